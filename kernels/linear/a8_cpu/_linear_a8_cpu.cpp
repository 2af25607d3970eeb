// Linear over weights of cpu_rows16_v1 with activations quantized to int8: 4-bit and 8-bit integers, and e2m1 (twice its
// values are integers). A unit is the columns, at most 256, that share the scales of weight and activation; its products
// are summed in integers, exactly, and units are added in float32:
//   y += (sum of code * x - zero * sum of x) * (scale of the weight * scale of x)
//
// Or weights of cpu_groups16_v1, for GGUF: groups may have an offset in units of the weight instead of a zero point, and
// scales and offsets may be int8 times a float that several groups share:
//   y += sum of code * x * (scale * scale of x) - sum of x * (offset * scale of x)
//
// Few rows of x: lines are decoded in registers and multiplied immediately. Many rows: a block's columns are decoded into
// a buffer that fits the cache, and multiplied by tiles of x. Both add in the same order, so a row's result is
// independent of other rows, threads and path.
// gm-levels: base avx2 avx512 avx512_vnni neon
#include "_linear_a8_math.h"
#include "calls/linear.h"
#include "gm_linear_epilogue.h"
#include "gm_rows16.h"

#include <cstdlib>

namespace {
using namespace a8;
using lin::kNone;

constexpr int kTileRows = 12 / kParts;  // rows of x whose accumulators fit in registers
constexpr int kDirectRows = kTileRows < 4 ? kTileRows : 4;
constexpr int64_t kPrefetchBytes = 2048;  // prefetch distance within a block, in bytes
constexpr int64_t kMaxUnit =
    256;  // columns of a unit at most: sums up to 255 * 127 * 256 are exact in float32
constexpr int64_t kChunkColumns = 256;  // columns decoded at a time
constexpr int64_t kChunkRows = 256;     // rows of x at a time: their chunk of columns fits the L2 cache
constexpr int64_t kChunkBlocks = 8;     // blocks that use a chunk of x before the next one
constexpr float kMinAmax = 1e-10f;      // of quant/activations.py

struct Job {
  const uint8_t* codes;
  const void *scales, *zeros;
  const float* row_scale;
  int scale_type, zero_type, implicit_zero;
  // Of cpu_groups16_v1: whether zeros are offsets; the float factors of int8 scales, and of offsets.
  bool offsets;
  const float *factors, *offset_factors;
  int factor_shift;     // log2 of the groups of a factor
  int64_t factor_runs;  // factors of a row
  int64_t n, k, columns, group, groups, blocks, block_bytes;
  int64_t act_block;  // columns of x that share a scale
  int64_t unit, units, units_per_group;
  int64_t rows;  // of x
  // Of x, in tiles of interleaved rows: the words of each step; and per unit its scale, and its sum times minus the
  // implicit zero (int32) or, with stored zeros, times -1 (float32).
  const uint32_t* words;
  const float* x_scales;
  const int32_t* x_sums;
};

// Rows of the next tile, of `left` rows: tiles of about equal size.
inline int tile_rows(int64_t left) {
  const int64_t tiles = (left + kTileRows - 1) / kTileRows;
  return int((left + tiles - 1) / tiles);
}

// How units are scaled. `any`: by the fields of the job, unit by unit. The others are GGUF's types, as compile-time
// constants: one unit per group of kGroup<F> columns.
// - half (Q4_0, Q8_0): float16 scales, nothing else.
// - factors (Q6_K), factors_offsets (Q4_K, Q5_K): int8 scales, and offsets, times factors. A sum is
//   multiplied by its int8 scale as an integer, the product by factor and scale of x in float32.
enum class Scaling { any, half, factors, factors_offsets };
template <Format F>
constexpr int64_t kGroup = F == Format::int6 ? 16 : 32;
template <Scaling S>
constexpr bool kFactors = S == Scaling::factors || S == Scaling::factors_offsets;

template <Format F>
Scaling scaling_of(const Job& j) {
  if (j.group != kGroup<F> || j.unit != j.group) return Scaling::any;
  const bool none = j.zero_type == kNone;
  if ((F == Format::int4 || F == Format::int8) && none && !j.factors && j.scale_type == GM_F16)
    return Scaling::half;
  if (!j.factors || j.scale_type != lin::kI8) return Scaling::any;
  if (F == Format::int6 && none) return Scaling::factors;
  if ((F == Format::int4 || F == Format::int5) && j.offsets && j.offset_factors && j.zero_type == lin::kI8)
    return Scaling::factors_offsets;
  return Scaling::any;
}

// Loads the scales (or zeros, or offsets) of the rows of a block for a unit.
inline lin::V load_unit(const Job& j, const void* base, int type, const float* factors, int64_t block,
                        int64_t unit) {
  const int64_t g = j.units_per_group == 1 ? unit : unit / j.units_per_group;
  lin::V v = lin::load16(base, type, block * j.groups + g);
  if (factors) {
    const float* by = factors + (block * j.factor_runs + (g >> j.factor_shift)) * kRows;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) v.p[i] *= gm::load(by + i * gm::kLanes);
  }
  return v;
}
inline lin::V scale_of(const Job& j, int64_t block, int64_t unit) {
  return load_unit(j, j.scales, j.scale_type, j.factors, block, unit);
}
inline lin::V zero_of(const Job& j, int64_t block, int64_t unit) {
  return load_unit(j, j.zeros, j.zero_type, j.offset_factors, block, unit);
}

// Scales of a unit; with kFactors `scale` has the bits of integer scales (integer_scales), and the factors are apart.
struct UnitScales {
  lin::V scale, factor, zero;
};
template <Format F, Scaling S>
inline UnitScales unit_scales(const Job& j, int64_t block, int64_t unit) {
  UnitScales u;
  if constexpr (kFactors<S>) {
    const int64_t at = (block * j.groups + unit) * kRows;
    const int64_t run = (block * j.factor_runs + (unit >> j.factor_shift)) * kRows;
    const auto* scales = static_cast<const int8_t*>(j.scales) + at;
    const auto* offsets = static_cast<const int8_t*>(j.zeros) + at;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      const int64_t o = i * gm::kLanes;
      u.scale.p[i] = integer_scales<Math<F>>(scales + o);
      u.factor.p[i] = gm::load(j.factors + run + o);
      if constexpr (S == Scaling::factors_offsets)
        u.zero.p[i] = lin::load_i8(offsets + o) * gm::load(j.offset_factors + run + o);
    }
  } else if constexpr (S == Scaling::half) {
    u.scale = lin::load16(j.scales, GM_F16, block * j.groups + unit);
  } else {
    u.scale = scale_of(j, block, unit);
    if (j.zero_type != kNone) u.zero = zero_of(j, block, unit);
  }
  return u;
}

// Decoded columns of a block: steps, and scales per unit.
struct Decoded {
  Int* steps;
  UnitScales* scales;
};

template <Format F, Scaling S>
void decode_units(const Job& j, int64_t block, int64_t u0, int64_t u1, const Decoded& to) {
  using M = Math<F>;
  constexpr int steps = M::template kSteps<F>, per_line = 32 / lin::kBits<F>;
  const int64_t first = u0 * j.unit, end = gm::min(u1 * j.unit, j.columns);
  const uint8_t* p = j.codes + block * j.block_bytes + line_bytes<F>(first / per_line);
  Int* out = to.steps;
  for (int64_t line = 0; line < (end - first) / per_line; ++line) {
    const Line w = load<F>(p, line);
    __builtin_prefetch(p + line_bytes<F>(line) + kPrefetchBytes);
#pragma GCC unroll 4
    for (int s = 0; s < steps; ++s) *out++ = M::template decode<F>(w, s);
  }
  for (int64_t u = u0; u < u1; ++u) to.scales[u - u0] = unit_scales<F, S>(j, block, u);
}

// totals += (sum + zero * x_sum) * (scale * x_scale); without zeros, sum * (scale * x_scale); with offsets
// instead, that plus offset * (x_sum * x_scale).
inline void add_unit(const Int& sum, const lin::V* zero, bool offset, float x_sum, const lin::V& scale,
                     float x_scale, float* totals) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    float* to = totals + i * gm::kLanes;
    gm::vf v = __builtin_convertvector(sum.p[i], gm::vf);
    gm::vf total = gm::load(to);
    if (offset)
      total = gm::fma(zero->p[i], gm::splat(x_sum * x_scale), total);
    else if (zero)
      v = gm::fma(zero->p[i], gm::splat(x_sum), v);
    gm::store(to, gm::fma(v, scale.p[i] * x_scale, total));
  }
}

// totals[row * 16 ...] += units [u0, u1) of a block by MR rows of x from row0; steps come from the packed
// lines, or from `decoded` where that is given.
template <Format F, int MR, bool kPacked>
void tile(const Job& j, int64_t block, const Decoded* decoded, int64_t row0, int64_t u0, int64_t u1,
          float* totals) {
  using M = Math<F>;
  constexpr int steps = M::template kSteps<F>, per_line = 32 / lin::kBits<F>;
  constexpr int64_t run = M::template kRun<F>;
  const uint32_t* x = j.words + row0 * (j.columns / M::kColumns) + u0 * j.unit / M::kColumns * MR;
  const uint8_t* p = j.codes + block * j.block_bytes + line_bytes<F>(u0 * j.unit / per_line);
  const Int* step = kPacked ? nullptr : decoded->steps;
  const auto add_line = [&](Int* acc, [[maybe_unused]] int64_t line) __attribute__((always_inline)) {
    Line w;
    if constexpr (kPacked) {
      w = load<F>(p, line);
      __builtin_prefetch(p + line_bytes<F>(line) + kPrefetchBytes);
    }
#pragma GCC unroll 4
    for (int s = 0; s < steps; ++s) {
      const Int operand = kPacked ? M::template decode<F>(w, s) : load_step(step++);
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r) M::mac(acc[r], operand, x[s * MR + r]);
    }
    x += steps * MR;
  };
  for (int64_t u = u0; u < u1; ++u) {
    const int64_t lines = gm::min(j.unit, j.columns - u * j.unit) / per_line;
    const int64_t at = row0 * j.units + u * MR;
    Int sum[MR];
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i)
        sum[r].p[i] = j.zero_type == kNone ? gm::vi{} + j.x_sums[at + r] : gm::vi{};
    if constexpr (M::kExact) {
      for (int64_t line = 0; line < lines; ++line) add_line(sum, line);
    } else {
      for (int64_t line = 0; line < lines; line += run) {
        Int acc[MR] = {};
        for (int64_t end = gm::min(line + run, lines), i = line; i < end; ++i) add_line(acc, i);
#pragma GCC unroll 12
        for (int r = 0; r < MR; ++r) M::widen(sum[r], acc[r]);
      }
    }
    if constexpr (kPacked) p += line_bytes<F>(lines);
    const lin::V scale = kPacked ? scale_of(j, block, u) : decoded->scales[u - u0].scale;
    if (j.zero_type != kNone) {
      const lin::V zero = kPacked ? zero_of(j, block, u) : decoded->scales[u - u0].zero;
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r)
        add_unit(sum[r], &zero, j.offsets, gm::bit_cast<float>(j.x_sums[at + r]), scale, j.x_scales[at + r],
                 totals + r * kRows);
    } else {
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r)
        add_unit(sum[r], nullptr, false, 0.0f, scale, j.x_scales[at + r], totals + r * kRows);
    }
  }
}

// tile() specialized for a scaling: no branches per unit, and totals stay in registers.
template <Format F, Scaling S, int MR, bool kPacked>
void specialized_tile(const Job& j, int64_t block, const Decoded* decoded, int64_t row0, int64_t u0,
                      int64_t u1, float* totals) {
  using M = Math<F>;
  constexpr int steps = M::template kSteps<F>, lines = int(kGroup<F> * lin::kBits<F> / 32);
  static_assert(M::kExact || lines <= M::template kRun<F>);
  const uint32_t* x = j.words + row0 * (j.columns / M::kColumns) + u0 * kGroup<F> / M::kColumns * MR;
  const uint8_t* p = j.codes + block * j.block_bytes + line_bytes<F>(u0 * lines);
  const Int* step = kPacked ? nullptr : decoded->steps;
  const int32_t* x_sums = j.x_sums + row0 * j.units + u0 * MR;
  const float* x_scales = j.x_scales + row0 * j.units + u0 * MR;
  gm::vf total[MR * kParts];
#pragma GCC unroll 24
  for (int i = 0; i < MR * kParts; ++i) total[i] = gm::load(totals + i * gm::kLanes);
  for (int64_t u = u0; u < u1; ++u, x_sums += MR, x_scales += MR) {
    Int acc[MR];
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i)  // no offsets: minus the implicit zero, where accumulators are int32
        acc[r].p[i] = M::kExact && S != Scaling::factors_offsets ? gm::vi{} + x_sums[r] : gm::vi{};
#pragma GCC unroll 8
    for (int line = 0; line < lines; ++line) {
      Line w;
      if constexpr (kPacked) {
        w = load<F>(p, line);
        __builtin_prefetch(p + line_bytes<F>(line) + kPrefetchBytes);
      }
#pragma GCC unroll 4
      for (int s = 0; s < steps; ++s) {
        const Int operand = kPacked ? M::template decode<F>(w, s) : load_step(step++);
#pragma GCC unroll 12
        for (int r = 0; r < MR; ++r) M::mac(acc[r], operand, x[s * MR + r]);
      }
      x += steps * MR;
    }
    if constexpr (kPacked) p += line_bytes<F>(lines);
    UnitScales own;
    if constexpr (kPacked) own = unit_scales<F, S>(j, block, u);
    const UnitScales& scales = kPacked ? own : decoded->scales[u - u0];
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      const float x_scale = x_scales[r];
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) {
        gm::vf& to = total[r * kParts + i];
        if constexpr (S == Scaling::factors_offsets)
          to = gm::fma(scales.zero.p[i], gm::splat(gm::bit_cast<float>(x_sums[r]) * x_scale), to);
        if constexpr (kFactors<S>) {
          to = gm::fma(integer_scaled<M>(acc[r].p[i], scales.scale.p[i]), scales.factor.p[i] * x_scale, to);
        } else {
          gm::vi sum = acc[r].p[i];
          if constexpr (!M::kExact) sum = M::widened(sum) + x_sums[r];
          to = gm::fma(__builtin_convertvector(sum, gm::vf), scales.scale.p[i] * x_scale, to);
        }
      }
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < MR * kParts; ++i) gm::store(totals + i * gm::kLanes, total[i]);
}

// Calls the tile for a number of rows that is known at run time.
template <Format F, Scaling S, bool kPacked, int MR = kPacked ? kDirectRows : kTileRows>
void dispatch_tile(int rows, const Job& j, int64_t block, const Decoded* decoded, int64_t row0, int64_t u0,
                   int64_t u1, float* totals) {
  if constexpr (MR > 1)
    if (rows < MR) return dispatch_tile<F, S, kPacked, MR - 1>(rows, j, block, decoded, row0, u0, u1, totals);
  if constexpr (S == Scaling::any)
    tile<F, MR, kPacked>(j, block, decoded, row0, u0, u1, totals);
  else
    specialized_tile<F, S, MR, kPacked>(j, block, decoded, row0, u0, u1, totals);
}

template <Format F, Scaling S, class T>
int run_direct(const Job& j, const lin::Output<T>& o) {
  const int64_t grain = (1 << 19) / (j.columns * kRows) + 1;
  return gm::parallel_for(j.blocks, grain, [&](int64_t begin, int64_t end) {
    alignas(64) float totals[kDirectRows * kRows];
    for (int64_t block = begin; block < end; ++block) {
      std::memset(totals, 0, sizeof totals);
      dispatch_tile<F, S, true>(int(j.rows), j, block, nullptr, 0, 0, j.units, totals);
      lin::apply_epilogue(j, o, block, 1, 0, j.rows, totals, kRows);
    }
  });
}

template <Format F, Scaling S, class T>
int run_buffered(const Job& j, const lin::Output<T>& o) {
  const int64_t chunk = kChunkColumns / j.unit;  // units decoded at a time
  int failed = 0;
  const int code = gm::parallel_for(j.blocks, 1, [&](int64_t begin, int64_t end) {
    const size_t steps = sizeof(Int) * size_t(kChunkColumns / Math<F>::kColumns);
    const size_t scales = sizeof(UnitScales) * size_t(chunk);
    const int64_t block_totals = j.rows * kRows;
    const size_t totals_bytes = sizeof(float) * size_t(block_totals * kChunkBlocks);
    char* scratch = static_cast<char*>(std::aligned_alloc(64, steps + scales + totals_bytes));
    if (!scratch) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    const Decoded decoded{reinterpret_cast<Int*>(scratch), reinterpret_cast<UnitScales*>(scratch + steps)};
    float* totals = reinterpret_cast<float*>(scratch + steps + scales);
    for (int64_t first = begin; first < end; first += kChunkBlocks) {
      const int64_t blocks = gm::min(kChunkBlocks, end - first);
      std::memset(totals, 0, totals_bytes);
      for (int64_t u = 0; u < j.units; u += chunk)
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t stop = gm::min(u + chunk, j.units);
          decode_units<F, S>(j, first + b, u, stop, decoded);
          for (int64_t row = 0; row < j.rows;) {
            const int rows = tile_rows(j.rows - row);
            dispatch_tile<F, S, false>(rows, j, first + b, &decoded, row, u, stop,
                                       totals + b * block_totals + row * kRows);
            row += rows;
          }
        }
      for (int64_t b = 0; b < blocks; ++b)
        lin::apply_epilogue(j, o, first + b, 1, 0, j.rows, totals + b * block_totals, kRows);
    }
    std::free(scratch);
  });
  return failed ? int(GM_E_NOMEM) : code;
}

// Scales and sums of the units of a block of columns [c0, end) with one scale, `gap` apart; both are moved on.
inline void finish_block(const Job& j, const int8_t* codes, int64_t c0, int64_t end, float scale,
                         float*& scales, int32_t*& sums, int64_t gap) {
  for (int64_t c = c0; c < end; c += j.unit, scales += gap, sums += gap) {
    int32_t sum = 0;
    for (int64_t i = c; i < gm::min(c + j.unit, end); ++i) sum += codes[i];
    *scales = scale;
    *sums = j.zero_type == kNone ? -j.implicit_zero * sum : gm::bit_cast<int32_t>(-float(sum));
  }
}

// Rows of x as given codes [m, k] and scales [m, blocks].
struct Given {
  const int8_t* codes;  // null: x is quantized here
  const float* scales;
  int64_t stride;           // of codes, between rows
  int64_t scale_stride[2];  // between rows and between blocks
};

// A given row in the packed order of columns, as quantize_row leaves it.
inline void take_row(const Job& j, float code_scale, const Given& given, int64_t row, const int32_t* perm,
                     int8_t* codes, float* scales, int32_t* sums, int64_t gap) {
  const int8_t* from = given.codes + row * given.stride;
  if (perm) {
    for (int64_t c = 0; c < j.columns; ++c) codes[c] = perm[c] < 0 ? int8_t(0) : from[perm[c]];
  } else {
    std::memcpy(codes, from, size_t(j.k));
    std::memset(codes + j.k, 0, size_t(j.columns - j.k));
  }
  const float* scale = given.scales + row * given.scale_stride[0];
  for (int64_t c0 = 0; c0 < j.columns; c0 += j.act_block) {
    // A block of padding alone has no scale.
    const float own = c0 < j.k || c0 == 0 ? *scale : 0.0f;
    finish_block(j, codes, c0, gm::min(c0 + j.act_block, j.columns), own * code_scale, scales, sums, gap);
    scale += given.scale_stride[1];
  }
}

// Quantizes a row of x to int8 codes in the packed order of columns, with scales and sums per unit, `gap` apart. values:
// scratch, float32 [columns]. The scale of a block that is not finite is NaN.
template <class T>
void quantize_row(const Job& j, float code_scale, const T* x, const int32_t* perm, float* values,
                  int8_t* codes, float* scales, int32_t* sums, int64_t gap) {
  if (perm) {
    for (int64_t c = 0; c < j.columns; ++c) values[c] = perm[c] < 0 ? 0.0f : gm::to_float(x[perm[c]]);
  } else {
    int64_t c = 0;
    for (; c + gm::kLanes <= j.k; c += gm::kLanes) gm::store(values + c, gm::load(x + c));
    for (; c < j.columns; ++c) values[c] = c < j.k ? gm::to_float(x[c]) : 0.0f;
  }
  constexpr int lanes = gm::kLanes;
  for (int64_t c0 = 0; c0 < j.columns; c0 += j.act_block) {
    const int64_t end = gm::min(c0 + j.act_block, j.columns);  // a multiple of 16, as c0
    gm::vf amax{}, not_finite{};
    for (int64_t c = c0; c < end; c += lanes) {
      const gm::vf v = gm::load(values + c);
      amax = gm::max(gm::abs(v), amax);
      not_finite = not_finite + v * 0.0f;
    }
    const float largest = gm::max(amax),
                scale = (largest > kMinAmax ? largest : kMinAmax) / 127.0f + gm::sum(not_finite);
    const gm::vf magic = gm::splat(12582912.0f);  // rounds to nearest, ties to even
    typedef int8_t bytes __attribute__((vector_size(lanes)));
    for (int64_t c = c0; c < end; c += lanes) {
      const gm::vi code = (gm::vi)(gm::load(values + c) / scale + magic) - 0x4b400000;
      const bytes narrow = __builtin_convertvector(code, bytes);
      std::memcpy(codes + c, &narrow, sizeof narrow);
    }
    finish_block(j, codes, c0, end, scale * code_scale, scales, sums, gap);
  }
}

// Of the rows from `first` on.
template <Format F, class T>
int quantize(const Job& j, const T* x, int64_t stride, const Given& given, int64_t first, const int32_t* perm,
             uint32_t* words, float* scales, int32_t* sums) {
  using M = Math<F>;
  int failed = 0;
  int64_t tiles = 0;
  for (int64_t row = 0; row < j.rows; row += tile_rows(j.rows - row)) ++tiles;
  const int code =
      gm::parallel_for(tiles, 65536 / (j.columns * kTileRows) + 1, [&](int64_t begin, int64_t end) {
        const size_t row_bytes = size_t(j.columns) * 4;
        char* scratch =
            static_cast<char*>(std::aligned_alloc(64, (row_bytes + size_t(j.columns) + 63) / 64 * 64));
        if (!scratch) {
          __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
          return;
        }
        float* values = reinterpret_cast<float*>(scratch);
        int8_t* codes = reinterpret_cast<int8_t*>(scratch + row_bytes);
        int64_t row0 = 0;
        for (int64_t i = 0; i < end; ++i) {
          const int rows = tile_rows(j.rows - row0);
          for (int r = 0; r < rows && i >= begin; ++r) {
            const float code_scale = F == Format::e2m1 ? 0.5f : 1.0f;
            float* to = scales + row0 * j.units + r;
            int32_t* sum = sums + row0 * j.units + r;
            if (given.codes != nullptr)
              take_row(j, code_scale, given, first + row0 + r, perm, codes, to, sum, rows);
            else
              quantize_row(j, code_scale, x + (first + row0 + r) * stride, perm, values, codes, to, sum,
                           rows);
            step_words<M>(codes, j.columns, words + row0 * (j.columns / M::kColumns) + r, rows);
          }
          row0 += rows;
        }
        std::free(scratch);
      });
  return failed ? int(GM_E_NOMEM) : code;
}

template <Format F, class T>
int run(Job& j, const T* x, int64_t stride, const Given& given, const int32_t* perm, int64_t m, const T* bias,
        const T* residual, T* out, bool silu) {
  constexpr int64_t per_line = 32 / lin::kBits<F>;
  if (kShared<F> && j.unit % (per_line * kShared<F>)) return GM_E_SHAPE;
  j.block_bytes = line_bytes<F>(j.columns / per_line);
  const auto rounded = [](int64_t bytes) { return size_t(bytes + 63) / 64 * 64; };
  const int64_t chunk_rows = gm::min(m, kChunkRows), columns_out = silu ? j.n / 2 : j.n;
  const size_t words = rounded(chunk_rows * (j.columns / Math<F>::kColumns) * 4),
               per_unit = rounded(chunk_rows * j.units * 4);
  char* scratch = static_cast<char*>(
      std::aligned_alloc(64, words + 2 * per_unit + (silu ? rounded(chunk_rows * j.n * 4) : 0)));
  if (!scratch) return GM_E_NOMEM;
  auto* x_words = reinterpret_cast<uint32_t*>(scratch);
  auto* x_scales = reinterpret_cast<float*>(scratch + words);
  auto* x_sums = reinterpret_cast<int32_t*>(scratch + words + per_unit);
  float* z = silu ? reinterpret_cast<float*>(scratch + words + 2 * per_unit) : nullptr;
  j.words = x_words;
  j.x_scales = x_scales;
  j.x_sums = x_sums;
  int code = GM_OK;
  for (int64_t row = 0; row < m && code == GM_OK; row += kChunkRows) {
    j.rows = gm::min(kChunkRows, m - row);
    code = quantize<F, T>(j, x, stride, given, row, perm, x_words, x_scales, x_sums);
    if (code != GM_OK) break;
    const T* added = residual ? residual + row * columns_out : nullptr;
    T* to = out + row * columns_out;
    const lin::Output<T> o{to, z, bias, silu ? nullptr : added};
    const bool direct = j.rows <= kDirectRows;
#define LINEAR_A8_SCALING(S) \
  if (scaling == Scaling::S) \
  code = direct ? run_direct<F, Scaling::S>(j, o) : run_buffered<F, Scaling::S>(j, o)
    const Scaling scaling = scaling_of<F>(j);
    LINEAR_A8_SCALING(any);
    if constexpr (F == Format::int4 || F == Format::int8) LINEAR_A8_SCALING(half);
    if constexpr (F == Format::int4 || F == Format::int5) LINEAR_A8_SCALING(factors_offsets);
    if constexpr (F == Format::int6) LINEAR_A8_SCALING(factors);
#undef LINEAR_A8_SCALING
    if (silu && code == GM_OK) code = lin::silu_mul(z, added, to, j.rows, columns_out);
  }
  std::free(scratch);
  return code;
}

inline int64_t gcd(int64_t a, int64_t b) { return b ? gcd(b, a % b) : a; }

// The product of a call with the weight of `j`. act_block: columns of x that share a scale, a multiple of 16
// (columns or more: the whole row).
int multiply(Job& j, const GmLinearCall& call, const void* perm, int64_t group, Format format,
             int64_t act_block) {
  const int64_t n = j.n, columns = j.columns;
  if (call.m < 0 || n < 1 || j.k < 1 || columns < j.k * (perm == nullptr) || columns % 16 || group < 8 ||
      group % 8 || columns % group || act_block < 16 || act_block % 16)
    return GM_E_SHAPE;
  if (perm && act_block < columns) return GM_E_SHAPE;  // blocks are of consecutive columns of x
  if (call.silu_mul && n % 2) return GM_E_SHAPE;
  if (call.m == 0) return GM_OK;
  if (j.scale_type == kNone) return GM_E_ARG;
  j.group = group;
  j.groups = columns / group;
  j.blocks = (n + kRows - 1) / kRows;
  j.act_block = gm::min(act_block, columns);
  j.factor_runs = j.groups >> j.factor_shift;
  if (j.groups != j.factor_runs << j.factor_shift) return GM_E_SHAPE;
  const bool one_scale = group == columns && j.act_block == columns;
  j.unit = one_scale ? gm::min(kMaxUnit, columns) : gcd(group, j.act_block);
  if (j.unit > kMaxUnit) {
    if (j.unit % kMaxUnit) return GM_E_SHAPE;
    j.unit = kMaxUnit;
  }
  if (j.unit % 8) return GM_E_SHAPE;
  j.units = (columns + j.unit - 1) / j.unit;
  j.units_per_group = (group + j.unit - 1) / j.unit;
  const auto* order = static_cast<const int32_t*>(perm);
  const Given given{static_cast<const int8_t*>(call.codes),
                    static_cast<const float*>(call.scales),
                    call.codes_stride[0],
                    {call.scales_stride[0], call.scales_stride[1]}};
#define LINEAR_A8_FORMAT(F)                                                                            \
  case Format::F:                                                                                      \
    return run<Format::F, T>(j, static_cast<const T*>(call.x), call.x_stride[0], given, order, call.m, \
                             static_cast<const T*>(call.bias), static_cast<const T*>(call.residual),   \
                             static_cast<T*>(call.out), call.silu_mul != 0)
  GM_DISPATCH_FLOAT(call.x_type, T, {
    switch (format) {
      LINEAR_A8_FORMAT(int4);
      LINEAR_A8_FORMAT(e2m1);
      LINEAR_A8_FORMAT(int8);
      LINEAR_A8_FORMAT(int5);
      LINEAR_A8_FORMAT(int6);
      default:
        break;
    }
  })
  return GM_E_ARG;
}

}  // namespace

// Options: as of gm_linear_rows16 (_linear_cpu.cpp), with formats 0 int4, 1 e2m1, 2 int8; block: columns of x
// that share a scale, 0 = the whole row.
GM_CPU_CALL(gm_linear_a8_rows16, Linear, format, columns, group, zero, e8m0, block)
(const GmLinearCall& call, const gm_linear_a8_rows16_options& options) {
  gm::Rows16 w;
  const int code =
      gm::read_rows16(&w, call.weight, call.weight_size, call.weight_type, call.n, call.k, options);
  if (code != GM_OK) return code;
  if (w.format < 0 || w.format > 2) return GM_E_ARG;
  if (w.experts != 1) return GM_E_SHAPE;
  Job j{};
  gm::set_weight(&j, w);
  j.implicit_zero = Format(w.format) == Format::e2m1 ? kCodeZero<Format::e2m1> : w.implicit_zero;
  return multiply(j, call, w.perm, w.group, Format(w.format), options.block ? options.block : w.columns);
}

// Over cpu_groups16_v1 (quant/layouts/cpu_groups16_v1.py): codes, scales, offsets (with the option minimums), and the
// factors of both, for as many groups as 256 columns have, where they are int8.
GM_CPU_CALL(gm_linear_a8_groups16, Linear, bits, group, minimums, block)
(const GmLinearCall& call, const gm_linear_a8_groups16_options& options) {
  constexpr int64_t kRun = 256;
  const int64_t bits = options.bits, group = options.group;
  if (bits != 4 && bits != 5 && bits != 6 && bits != 8) return GM_E_ARG;
  if (call.n < 1 || call.k < 1 || group < 1) return GM_E_SHAPE;
  const int64_t *size = call.weight_size, *type = call.weight_type;
  const bool is_int8[] = {type[1] == GM_I8, options.minimums && type[2] == GM_I8};
  const int64_t line_bytes = bits == 4 ? 8 : bits == 5 ? 10 : bits == 6 ? 12 : 16;  // of 16 rows of a column
  const int64_t blocks = (call.n + kRows - 1) / kRows, scales = blocks * (call.k / group) * kRows,
                factors = blocks * (call.k / kRun) * kRows;
  if (type[0] != GM_U8 || type[3] != GM_F32 || type[4] != GM_F32) return GM_E_DTYPE;
  if (size[0] != blocks * call.k * line_bytes || size[1] != scales ||
      size[2] != (options.minimums ? scales : 0) || size[3] != (is_int8[0] ? factors : 0) ||
      size[4] != (is_int8[1] ? factors : 0))
    return GM_E_SHAPE;
  if ((is_int8[0] || is_int8[1]) && call.k % kRun) return GM_E_SHAPE;
  const auto type_of = [&](int i) { return type[i] == GM_I8 ? int(lin::kI8) : int(type[i]); };
  Job j{};
  j.codes = static_cast<const uint8_t*>(call.weight[0]);
  j.scales = call.weight[1];
  j.zeros = options.minimums ? call.weight[2] : nullptr;
  j.scale_type = type_of(1);
  j.zero_type = options.minimums ? type_of(2) : int(kNone);
  j.offsets = options.minimums != 0;
  j.implicit_zero = options.minimums ? 0 : 1 << (bits - 1);
  j.factors = size[3] ? static_cast<const float*>(call.weight[3]) : nullptr;
  j.offset_factors = size[4] ? static_cast<const float*>(call.weight[4]) : nullptr;
  const int64_t shared = size[3] || size[4] ? kRun / group : 1;  // groups of a factor
  while (int64_t(1) << j.factor_shift < shared) ++j.factor_shift;
  if (int64_t(1) << j.factor_shift != shared) return GM_E_SHAPE;
  j.n = call.n, j.k = call.k, j.columns = call.k;
  const Format format = bits == 4   ? Format::int4
                        : bits == 5 ? Format::int5
                        : bits == 6 ? Format::int6
                                    : Format::int8;
  return multiply(j, call, nullptr, group, format, options.block ? options.block : call.k);
}
