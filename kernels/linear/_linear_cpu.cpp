// Linear over weights of cpu_rows16_v1 in every scheme: y = x W^T with codes decoded exactly, and each group summed in
// float32 and scaled once,
//   (sum over groups of scale * (sum of code * x - zero * sum of x)) * row multiplier.
//
// Few rows of x ("direct"): lines of several row blocks are decoded in registers and multiplied immediately. Many rows
// ("buffered"): a block's columns are decoded into a buffer that fits the cache, and multiplied by tiles of x. Both add
// in the same order, one chain per output, so a row's result is independent of other rows, threads and path.
// gm-levels: base avx2 avx512 avx512_bf16 neon
#include "calls/linear.h"
#include "gm_linear_decode.h"
#include "gm_linear_epilogue.h"
#include "gm_rows16.h"

#include <cstdlib>

namespace {
using namespace lin;

// Blocks of W that are decoded together for one row of x; fewer for a small weight, where missing blocks would repeat
// the last one.
constexpr int kBlocksAtOnce = gm::kLanes == 16 ? 8 : gm::kLanes == 8 ? 2 : 1;
constexpr int kFewBlocksAtOnce = kBlocksAtOnce > 2 ? 2 : 1;
constexpr int kDirectRows = gm::kLanes == 16 ? 8 : 4;  // rows of x up to which the direct path is taken
constexpr int kTileBlocks = gm::kLanes == 16 ? 2 : 1, kTileRows = gm::kLanes == 16 ? 8 : 4;
constexpr int kAnyScale = -2;
// Prefetch distance within a block, in bytes; prefetches past its end are harmless.
constexpr int64_t kPrefetchBytes = 2048;
constexpr int64_t kChunkRows = 256;     // rows of x at a time
constexpr int64_t kChunkColumns = 256;  // columns decoded at a time; a multiple of every group size

struct Job {
  const uint8_t* codes;
  const void *scales, *zeros;
  const float* row_scale;
  int scale_type, zero_type;
  int64_t n, k, columns, group, groups, blocks, block_bytes;
  Table table;
  float bias;
  const void*
      acts;  // x in tiles of rows, each [columns / Math::kColumns][rows of the tile]: see pack_activations
  const float* sums;  // [rows, whole tiles][groups]: sum of x over each group, when there are zeros
  int64_t rows;
};

// totals[row] += scale * (sum[row] - zero * sum of x[row]) for MR rows of one group of a block; `stride` floats per row.
// Always inlined with constant indices, so that sums stay in registers. S: the scale type, known at compile time for
// small groups (which have no zeros then), or kAnyScale.
template <int MR, int S>
__attribute__((always_inline)) inline void scale_group(const Job& j, int64_t block, int64_t g, int64_t row0,
                                                       V* sum, int64_t sum_stride, float* totals,
                                                       int64_t stride) {
  const int64_t at = block * j.groups + g;
  const int type = S == kAnyScale ? j.scale_type : S;
  if (S == kAnyScale && j.zero_type != kNone) {
    const V zero = load16(j.zeros, j.zero_type, at);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const gm::vf x = gm::splat(-j.sums[(row0 + r) * j.groups + g]);
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i)
        sum[r * sum_stride].p[i] = gm::fma(zero.p[i], x, sum[r * sum_stride].p[i]);
    }
  }
  const V scale = type == kNone ? V{} : load16(j.scales, type, at);
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      float* to = totals + r * stride + i * gm::kLanes;
      const gm::vf v = sum[r * sum_stride].p[i];
      gm::store(to, type == kNone ? v : gm::fma(v, scale.p[i], gm::load(to)));
    }
}

inline int64_t padded_rows(int64_t rows) { return (rows + kDirectRows - 1) / kDirectRows * kDirectRows; }

// Rows of the next tile, of `left` rows of x. Both packing and reading x follow it.
inline int tile_rows(int64_t left, bool direct) {
  if (direct) return left <= 1 ? 1 : left <= 2 ? 2 : left <= 4 ? 4 : kDirectRows;
  return left > kTileRows / 2 ? kTileRows : left > 1 ? kTileRows / 2 : 1;
}

// Totals of at most MR rows and NB blocks from block0 on -> totals[(row * NB + block) * 16 + lane].
template <Format F, class M, int S, int NB, int MR>
void direct(const Job& j, int64_t block0, float* totals) {
  constexpr int steps = M::template kSteps<F>;
  const int64_t lines = j.group * kBits<F> / 32;
  const typename M::Act* x = static_cast<const typename M::Act*>(j.acts);
  const uint8_t* p[NB];
  // Blocks past the end repeat the last one; their totals are dropped.
  for (int b = 0; b < NB; ++b) p[b] = j.codes + gm::min(block0 + b, j.blocks - 1) * j.block_bytes;
  const Table& table = j.table;
  const float bias = j.bias;
  std::memset(totals, 0, sizeof(float) * MR * NB * kRows);
  for (int64_t g = 0; g < j.groups; ++g) {
    V sum[MR][NB] = {};
    for (int64_t line = 0; line < lines; ++line) {
#pragma GCC unroll 8
      for (int b = 0; b < NB; ++b) {
        const W w = load_line(p[b]);
        __builtin_prefetch(p[b] + kPrefetchBytes);
        p[b] += 64;
#pragma GCC unroll 8
        for (int s = 0; s < steps; ++s) {
          const typename M::Operand operand = M::template decode<F>(w, s, table, bias);
#pragma GCC unroll 8
          for (int r = 0; r < MR; ++r) M::mac(sum[r][b], operand, x + s * MR + r);
        }
      }
      x += steps * MR;
    }
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b)
      scale_group<MR, S>(j, gm::min(block0 + b, j.blocks - 1), g, 0, &sum[0][b], NB, totals + b * kRows,
                         NB * kRows);
  }
}

// Decodes columns [c0, c0 + count) of a block -> out[step * NB].
template <Format F, class M, int NB>
void decode_block(const Job& j, int64_t block, int64_t c0, int64_t count, typename M::Operand* out) {
  constexpr int steps = M::template kSteps<F>;
  const uint8_t* p = j.codes + block * j.block_bytes + c0 * kBits<F> * 2;
  for (int64_t line = 0; line < count * kBits<F> / 32; ++line, p += 64) {
    const W w = load_line(p);
#pragma GCC unroll 8
    for (int s = 0; s < steps; ++s)
      out[(line * steps + s) * NB] = M::template decode<F>(w, s, j.table, j.bias);
  }
}

// Adds a tile of MR rows and NB blocks over decoded columns [c0, c0 + count) to totals (which hold unscaled sums within
// a group).
template <class M, int S, int NB, int MR>
void tile(const Job& j, const typename M::Operand* w, int64_t block0, int64_t row0, int64_t c0, int64_t count,
          float* totals) {
  const typename M::Act* x =
      static_cast<const typename M::Act*>(j.acts) + (row0 * j.columns + c0 * MR) / M::kColumns;
  const bool whole = j.groups == 1;  // the group spans all chunks
  const int64_t span = whole ? count : j.group, steps = span / M::kColumns;
  for (int64_t c = 0; c < count; c += span, w += steps * NB, x += steps * MR) {
    V sum[MR][NB] = {};
    if (whole) std::memcpy(sum, totals, sizeof sum);
    for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
        for (int b = 0; b < NB; ++b) M::mac(sum[r][b], w[s * NB + b], x + s * MR + r);
    }
    if (whole && c0 + count < j.columns) {
      std::memcpy(totals, sum, sizeof sum);
      continue;
    }
    if (whole) std::memset(totals, 0, sizeof sum);
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b)
      scale_group<MR, S>(j, gm::min(block0 + b, j.blocks - 1), (c0 + c) / j.group, row0, &sum[0][b], NB,
                         totals + b * kRows, NB * kRows);
  }
}

template <Format F, class M, int S>
void buffered(const Job& j, int64_t block0, typename M::Operand* decoded, float* totals) {
  constexpr int NB = kTileBlocks;
  std::memset(totals, 0, sizeof(float) * size_t(padded_rows(j.rows)) * NB * kRows);
  for (int64_t c0 = 0; c0 < j.columns; c0 += kChunkColumns) {
    const int64_t count = gm::min(kChunkColumns, j.columns - c0);
    for (int b = 0; b < NB; ++b)
      decode_block<F, M, NB>(j, gm::min(block0 + b, j.blocks - 1), c0, count, decoded + b);
    for (int64_t r = 0; r < j.rows; r += kTileRows) {
      float* t = totals + r * NB * kRows;
      const int64_t left = j.rows - r;
      if (left > kTileRows / 2)
        tile<M, S, NB, kTileRows>(j, decoded, block0, r, c0, count, t);
      else if (left > 1)
        tile<M, S, NB, kTileRows / 2>(j, decoded, block0, r, c0, count, t);
      else
        tile<M, S, NB, 1>(j, decoded, block0, r, c0, count, t);
    }
  }
}

template <Format F, class M, int S, class T, int NB, int MR>
int run_direct(const Job& j, const Output<T>& o) {
  const int64_t tasks = (j.blocks + NB - 1) / NB, grain = (1 << 19) / (j.columns * kRows * NB) + 1;
  return gm::parallel_for(tasks, grain, [&](int64_t begin, int64_t end) {
    alignas(64) float totals[NB * MR * kRows];
    for (int64_t task = begin; task < end; ++task) {
      direct<F, M, S, NB, MR>(j, task * NB, totals);
      apply_epilogue(j, o, task * NB, NB, 0, j.rows, totals, NB * kRows);
    }
  });
}

template <Format F, class M, int S, class T>
int run_buffered(const Job& j, const Output<T>& o) {
  constexpr int NB = kTileBlocks;
  const int64_t tasks = (j.blocks + NB - 1) / NB;
  int failed = 0;
  const int code = gm::parallel_for(tasks, 1, [&](int64_t begin, int64_t end) {
    const size_t decoded = sizeof(typename M::Operand) * NB * (kChunkColumns / M::kColumns);
    void* scratch =
        std::aligned_alloc(64, decoded + sizeof(float) * size_t(padded_rows(j.rows)) * NB * kRows);
    if (!scratch) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    auto* operands = static_cast<typename M::Operand*>(scratch);
    auto* totals = reinterpret_cast<float*>(static_cast<char*>(scratch) + decoded);
    for (int64_t task = begin; task < end; ++task) {
      buffered<F, M, S>(j, task * NB, operands, totals);
      apply_epilogue(j, o, task * NB, NB, 0, j.rows, totals, NB * kRows);
    }
    std::free(scratch);
  });
  return failed ? int(GM_E_NOMEM) : code;
}

// Packs x in the order of packed columns and the format of M, in tiles of interleaved rows; and sums each group.
template <Format F, class M, class T>
void pack_activations(const Job& j, const T* x, int64_t stride, const int32_t* perm, typename M::Act* acts,
                      float* sums) {
  const int64_t count = j.columns / M::kColumns;
  const auto at = [&](const T* row, int64_t c) -> T {
    const int64_t source = perm ? perm[c] : c;
    return source >= 0 && source < j.k ? row[source] : T{};
  };
  int64_t r0 = 0;
  const bool in_registers = j.rows <= kDirectRows;
  while (r0 < j.rows) {
    const int rows = tile_rows(j.rows - r0, in_registers);
    for (int i = 0; i < rows; ++i) {
      typename M::Act* to = acts + r0 * count + i;
      if (r0 + i >= j.rows) {  // padding of the tile
        for (int64_t c = 0; c < count; ++c) to[c * rows] = 0;
        if (sums) std::memset(sums + (r0 + i) * j.groups, 0, sizeof(float) * size_t(j.groups));
        continue;
      }
      const T* row = x + (r0 + i) * stride;
      if constexpr (M::kColumns == 1) {
        for (int64_t c = 0; c < j.columns; ++c) to[c * rows] = gm::to_float(at(row, c));
      }
#if GM_X86_BF16
      else {
        constexpr int gap = kBits<F> == 16 ? 1 : 2;
        for (int64_t p = 0; p < count; ++p) {
          const int64_t c = Bf16::column<F>(p);
          to[p * rows] = uint32_t(at(row, c).bits) | uint32_t(at(row, c + gap).bits) << 16;
        }
      }
#endif
      if (!sums) continue;
      for (int64_t g = 0; g < j.groups; ++g) {
        float sum = 0;
        for (int64_t c = g * j.group; c < (g + 1) * j.group; ++c) sum += gm::to_float(at(row, c));
        sums[(r0 + i) * j.groups + g] = sum;
      }
    }
    r0 += rows;
  }
}

template <Format F, class M, int S, class T>
int run(Job& j, const T* x, int64_t stride, const int32_t* perm, int64_t m, const T* bias, const T* residual,
        T* out, const Gating& gating) {
  const bool silu = gating.kind != kUngated;
  const int64_t chunk_rows = padded_rows(gm::min(m, kChunkRows)), columns_out = silu ? j.n / 2 : j.n;
  const size_t acts = (size_t(chunk_rows) * j.columns / M::kColumns * sizeof(typename M::Act) + 63) / 64 * 64;
  const size_t sums = j.zero_type == kNone ? 0 : (size_t(chunk_rows) * j.groups * 4 + 63) / 64 * 64;
  const size_t z = silu ? (size_t(chunk_rows) * j.n * 4 + 63) / 64 * 64 : 0;
  char* scratch = static_cast<char*>(std::aligned_alloc(64, acts + sums + z));
  if (!scratch) return GM_E_NOMEM;
  float* zs = silu ? reinterpret_cast<float*>(scratch + acts + sums) : nullptr;
  int code = GM_OK;
  for (int64_t row = 0; row < m && code == GM_OK; row += kChunkRows) {
    j.rows = gm::min(kChunkRows, m - row);
    j.acts = scratch;
    float* group_sums = sums ? reinterpret_cast<float*>(scratch + acts) : nullptr;
    j.sums = group_sums;
    pack_activations<F, M, T>(j, x + row * stride, stride, perm, reinterpret_cast<typename M::Act*>(scratch),
                              group_sums);
    const T* added = residual ? residual + row * columns_out : nullptr;
    T* to = out + row * columns_out;
    const Output<T> o{to, zs, bias, silu ? nullptr : added};
    if (j.rows == 1 && j.blocks <= kBlocksAtOnce / 2)
      code = run_direct<F, M, S, T, kFewBlocksAtOnce, 1>(j, o);
    else if (j.rows == 1)
      code = run_direct<F, M, S, T, kBlocksAtOnce, 1>(j, o);
    else if (j.rows == 2)
      code = run_direct<F, M, S, T, kBlocksAtOnce, 2>(j, o);
    else if (j.rows <= 4)
      code = run_direct<F, M, S, T, (kBlocksAtOnce > 2 ? kBlocksAtOnce / 2 : 1), 4>(j, o);
    else if (j.rows <= kDirectRows)
      code = run_direct<F, M, S, T, (kBlocksAtOnce > 4 ? kBlocksAtOnce / 4 : 1), kDirectRows>(j, o);
    else
      code = run_buffered<F, M, S, T>(j, o);
    if (!silu || code != GM_OK) continue;
    code = gating.kind == kClamped ? swiglu_clamped(zs, to, j.rows, columns_out, gating)
                                   : silu_mul(zs, added, to, j.rows, columns_out);
  }
  std::free(scratch);
  return code;
}

template <Format F, class M, class T>
int dispatch_scale(Job& j, const T* x, int64_t stride, const int32_t* perm, int64_t m, const T* bias,
                   const T* residual, T* out, const Gating& gating) {
  if constexpr (F == Format::e2m1) {
    if (j.scale_type == kE4M3 && j.zero_type == kNone)
      return run<F, M, kE4M3, T>(j, x, stride, perm, m, bias, residual, out, gating);
    if (j.scale_type == kE8M0 && j.zero_type == kNone)
      return run<F, M, kE8M0, T>(j, x, stride, perm, m, bias, residual, out, gating);
  }
  return run<F, M, kAnyScale, T>(j, x, stride, perm, m, bias, residual, out, gating);
}

template <Format F, class T>
int dispatch_math(Job& j, const T* x, int64_t stride, const int32_t* perm, int64_t m, const T* bias,
                  const T* residual, T* out, const Gating& gating) {
#if GM_X86_BF16
  if constexpr (F != Format::f32 && F != Format::f16)
    if constexpr (__is_same(T, gm::bf16))
      return dispatch_scale<F, Bf16, T>(j, x, stride, perm, m, bias, residual, out, gating);
#endif
  return dispatch_scale<F, F32, T>(j, x, stride, perm, m, bias, residual, out, gating);
}

int linear_rows(const gm::Rows16Product& p) {
  const gm::Rows16& w = p.weight;
  const int64_t columns = w.columns, group = w.group;
  if (p.m < 0 || w.n < 1 || w.k < 1 || columns < w.k * (w.perm == nullptr) || columns % 16 || group < 8 ||
      group % 8 || columns % group)
    return GM_E_SHAPE;
  if (group != columns && kChunkColumns % group) return GM_E_SHAPE;
  const Gating gating{Gate(p.gate), p.alpha, p.limit};
  if (gating.kind != kUngated && w.n % 2) return GM_E_SHAPE;
  if (p.m == 0) return GM_OK;
  static const int bits[7] = {4, 4, 8, 8, 32, 16, 16};
  if (w.format < 0 || w.format > 6) return GM_E_ARG;
  Job j{};
  gm::set_weight(&j, w);
  j.group = group;
  j.groups = columns / group;
  j.blocks = (w.n + kRows - 1) / kRows;
  j.block_bytes = columns * bits[w.format] * 2;
  j.bias = float(w.implicit_zero);
  j.table = make_table(Format(w.format), j.bias);
  const auto* order = static_cast<const int32_t*>(w.perm);
#define LINEAR_FORMAT(F)                                                                                 \
  case int(Format::F):                                                                                   \
    return dispatch_math<Format::F, T>(j, static_cast<const T*>(p.x), p.x_row_stride, order, p.m,        \
                                       static_cast<const T*>(p.bias), static_cast<const T*>(p.residual), \
                                       static_cast<T*>(p.out), gating)
  GM_DISPATCH_FLOAT(p.type, T, {
    switch (w.format) {
      LINEAR_FORMAT(int4);
      LINEAR_FORMAT(e2m1);
      LINEAR_FORMAT(int8);
      LINEAR_FORMAT(e4m3);
      LINEAR_FORMAT(f32);
      LINEAR_FORMAT(f16);
      LINEAR_FORMAT(bf16);
    }
  })
  return GM_E_ARG;
}

}  // namespace

// The product that grouped_linear and moe call for each expert.
GM_KERNEL(gm_rows16_product)(const gm::Rows16Product& product) { return linear_rows(product); }

GM_CPU_CALL(gm_linear_rows16, Linear, format, columns, group, zero, e8m0)
(const GmLinearCall& call, const gm_linear_rows16_options& options) {
  gm::Rows16Product p{.x = call.x,
                      .x_row_stride = call.x_stride[0],
                      .bias = call.bias,
                      .residual = call.residual,
                      .out = call.out,
                      .m = call.m,
                      .gate = call.silu_mul ? kSilu : kUngated,
                      .type = int(call.x_type)};
  const int code =
      gm::read_rows16(&p.weight, call.weight, call.weight_size, call.weight_type, call.n, call.k, options);
  if (code != GM_OK) return code;
  return p.weight.experts == 1 ? linear_rows(p) : GM_E_SHAPE;
}
