// Linear for few rows of x on AMD GPUs:
// y = x W^T for M <= 8, W dense or in 4- or 8-bit integers, with its epilogue.
//
// The lanes of a wave share the K of two rows of W: each reads 16 bytes of W at a time, once, past the
// caches, and multiplies them with x, which the workgroup keeps in LDS. A sum over the lanes ends a pair of
// rows. Where the rows alone do not fill the device, K is split over workgroups: each stores its sums to a
// slice of its own, and the last one to arrive at a tile adds the slices in their order, so the result does
// not depend on which one is last. No workgroup waits for another.
//
// The algorithm is vLLM's wvSplitK and, for the split, wvSplitKrc (csrc/rocm/skinny_gemms.cu); integer
// weights are ours.
#include "gm_hip.h"

struct WvSplitKParams {
  void* y;
  const void* x;
  const void* w;
  const void* scales;    // [n, groups]; unused if dense
  const uint8_t* zeros;  // codes of the zero points [n, groups]; null: 2^(bits - 1)
  const void* bias;      // [n], null without
  const void* residual;  // [m, columns of y], null without
  float* sums;           // of splits > 1: [splits, tiles, waves, 2 M]
  uint32_t* counters;    // of splits > 1: [tiles], zero before and after
  int64_t ldx;           // elements between rows of x
  int32_t m, n, k;
  int32_t chunk;      // columns of W per chunk of x in LDS
  int32_t per_split;  // chunks per split
  int32_t splits, tiles, blocks;
  int32_t groups, group_shift;  // a column k belongs to scale k >> group_shift of its row
  int32_t scale_type;           // DTYPE_CODES
  int32_t silu_mul;             // rows of W: gate, then up
  int32_t vectors;              // rows of x are aligned to 16 bytes
};

// Waves of a workgroup.
enum { kWaves = 8 };

#define GM_WV_TOKENS(X, format, type) \
  X(format, type, 1) X(format, type, 2) X(format, type, 4) X(format, type, 8)
#define GM_WV_TYPES(X, format) GM_WV_TOKENS(X, format, Bf16) GM_WV_TOKENS(X, format, Half)
#define GM_WV_KERNELS(X) GM_WV_TYPES(X, Dense) GM_WV_TYPES(X, Int4) GM_WV_TYPES(X, Int8)

#if GM_HIP_DEVICE

// Rows of W of a wave, lanes of a workgroup.
enum { kRows = 2, kThreads = kWaves * GM_LANES };

// A format says how many columns 16 bytes of W hold (kWidth), in what order x is kept, so that its pairs meet
// those that codes decode to (order), what these columns share (Scales), and how they are multiplied (Sum):
// add() gets piece j of 8 columns of x, for all tokens, and all of W.

struct Dense {
  enum { kWidth = 8 };
  GM_DEVICE static u32x4 order(u32x4 x) { return x; }
  struct Scales {
    GM_DEVICE void load(const WvSplitKParams&, const int64_t (&)[kRows], int) {}
  };
  template <class T, int M>
  struct Sum {
    GM_DEVICE void start() {}
    GM_DEVICE void add(const Scales&, const u32x4 (&w)[kRows], int, const u32x4 (&x)[M],
                       float (&sums)[M][kRows]) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int row = 0; row < kRows; ++row)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][row] = T::dot2(x[m][i], w[row][i], sums[m][row]);
    }
    GM_DEVICE void finish(const Scales&, float (&)[M][kRows]) {}
  };
};

GM_DEVICE float load_scale(const void* scales, int64_t at, int type) {
  if (type == 0) return static_cast<const float*>(scales)[at];
  const uint32_t bits = static_cast<const uint16_t*>(scales)[at];
  return type == 1 ? gm::Half::to_float(bits) : gm::Bf16::to_float(bits);
}

// Scale and zero point of 16 bytes of codes, for the rows of a wave.
template <int kBits>
struct Group {
  float scale[kRows];
  uint32_t zero[kRows];
  GM_DEVICE void load(const WvSplitKParams& p, const int64_t (&rows)[kRows], int column) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int64_t at = rows[row] * p.groups + (column >> p.group_shift);
      scale[row] = load_scale(p.scales, at, p.scale_type);
      zero[row] = p.zeros != nullptr ? p.zeros[at] : 1u << (kBits - 1);
    }
  }
};

// The sum of the columns under one scale, which finish() multiplies with it.
template <int M>
struct Part {
  float part[M][kRows];
  GM_DEVICE void start() {
#pragma unroll
    for (int i = 0; i < M * kRows; ++i) part[i / kRows][i % kRows] = 0.0f;
  }
  template <class Scales>
  GM_DEVICE void finish(const Scales& group, float (&sums)[M][kRows]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        sums[m][row] = gm::fused(group.scale[row], part[m][row], sums[m][row]);
  }
};

// fp16: codes are or-ed into the mantissa of 1024:
// whole numbers from which the zero point is subtracted exactly.
template <class Format, int M>
struct InHalf : Part<M> {
  using Part<M>::part;
  GM_DEVICE void add(const typename Format::Scales& group, const u32x4 (&w)[kRows], int j,
                     const u32x4 (&x)[M], float (&)[M][kRows]) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const uint32_t zero = (group.zero[row] | 0x6400u) * 0x10001u;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = gm::Half::minus(Format::codes(w[row], j, i) | 0x64006400u, zero);
#pragma unroll
        for (int m = 0; m < M; ++m) part[m][row] = gm::Half::dot2(x[m][i], pair, part[m][row]);
      }
    }
  }
};

// bf16 without its dot product, or with codes of 8 bits,
// which it does not hold beside an offset: codes and x become float32.
template <class Format, int M>
struct InFloat : Part<M> {
  using Part<M>::part;
  GM_DEVICE void add(const typename Format::Scales& group, const u32x4 (&w)[kRows], int j,
                     const u32x4 (&x)[M], float (&)[M][kRows]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float first[kRows], second[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint32_t codes = Format::codes(w[row], j, i);
        const float zero = float(group.zero[row]);
        first[row] = float(codes & 0xFFFFu) - zero, second[row] = float(codes >> 16) - zero;
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float even = gm::bits_to_float(x[m][i] << 16), odd = gm::bits_to_float(x[m][i] & 0xFFFF0000u);
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          part[m][row] = gm::fused(odd, second[row], gm::fused(even, first[row], part[m][row]));
      }
    }
  }
};

// bf16 has no packed subtraction: 4-bit codes are or-ed into the mantissa of 128, and the sum of x times 128
// plus the zero point is subtracted from the sum of the columns, in float32.
template <class Format, int M>
struct Offset : Part<M> {
  using Part<M>::part;
  float total[M];
  GM_DEVICE void start() {
    Part<M>::start();
#pragma unroll
    for (int m = 0; m < M; ++m) total[m] = 0.0f;
  }
  GM_DEVICE void add(const typename Format::Scales&, const u32x4 (&w)[kRows], int j, const u32x4 (&x)[M],
                     float (&)[M][kRows]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int m = 0; m < M; ++m) total[m] = gm::Bf16::dot2(x[m][i], 0x3F803F80u, total[m]);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint32_t pair = Format::codes(w[row], j, i) | 0x43004300u;
#pragma unroll
        for (int m = 0; m < M; ++m) part[m][row] = gm::Bf16::dot2(x[m][i], pair, part[m][row]);
      }
    }
  }
  GM_DEVICE void finish(const typename Format::Scales& group, float (&sums)[M][kRows]) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float offset = -128.0f - float(group.zero[row]);
#pragma unroll
      for (int m = 0; m < M; ++m) part[m][row] = gm::fused(offset, total[m], part[m][row]);
    }
    Part<M>::finish(group, sums);
  }
};

// The low halves of a and b, and the high ones, as pairs.
GM_DEVICE uint32_t low_pair(uint32_t a, uint32_t b) { return (a & 0xFFFFu) | b << 16; }
GM_DEVICE uint32_t high_pair(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xFFFF0000u); }

template <class A, class B, bool kFirst>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<A, B, false> {
  using Type = B;
};
template <class T>
struct IsHalf {
  enum { value = 0 };
};
template <>
struct IsHalf<gm::Half> {
  enum { value = 1 };
};

struct Int4 {
  enum { kWidth = 32 };
  using Scales = Group<4>;
  // Pairs 0 4, 1 5, 2 6, 3 7 of eight columns: a shift and a mask decode those of a word of codes.
  GM_DEVICE static u32x4 order(u32x4 x) {
    return u32x4{low_pair(x[0], x[2]), high_pair(x[0], x[2]), low_pair(x[1], x[3]), high_pair(x[1], x[3])};
  }
  GM_DEVICE static uint32_t codes(const u32x4& w, int j, int i) { return w[j] >> 4 * i & 0x000F000Fu; }
  template <int M>
  using SumBf16 = typename Either<Offset<Int4, M>, InFloat<Int4, M>, GM_DOT2_BF16>::Type;
  template <class T, int M>
  using Sum = typename Either<InHalf<Int4, M>, SumBf16<M>, IsHalf<T>::value>::Type;
};

struct Int8 {
  enum { kWidth = 16 };
  using Scales = Group<8>;
  // Pairs 0 2, 1 3 of four columns: of a word of codes, the even bytes and the odd ones.
  GM_DEVICE static u32x4 order(u32x4 x) {
    return u32x4{low_pair(x[0], x[1]), high_pair(x[0], x[1]), low_pair(x[2], x[3]), high_pair(x[2], x[3])};
  }
  GM_DEVICE static uint32_t codes(const u32x4& w, int j, int i) {
    return w[2 * j + i / 2] >> 8 * (i % 2) & 0x00FF00FFu;
  }
  template <class T, int M>
  using Sum = typename Either<InHalf<Int8, M>, InFloat<Int8, M>, IsHalf<T>::value>::Type;
};

// Columns [first, first + 8 pieces) of x to LDS: eight of them per 16 bytes, [M, pieces of a unit, units],
// such that lanes read consecutive 16 bytes. Rows past m are zero.
template <class Format, int M>
GM_DEVICE void stage(const WvSplitKParams& p, u32x4* kept, int first, int units) {
  constexpr int kPieces = Format::kWidth / 8;
  const int pieces = units * kPieces;
  for (int at = gm::thread(); at < M * pieces; at += kThreads) {
    const int m = at / pieces, piece = at - m * pieces;
    u32x4 value = {0, 0, 0, 0};
    if (m < p.m) {
      const uint16_t* from = static_cast<const uint16_t*>(p.x) + m * p.ldx + first + 8 * piece;
      if (p.vectors)
        value = *reinterpret_cast<const u32x4*>(from);
      else
        for (int i = 0; i < 4; ++i) value[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
    }
    kept[(m * kPieces + piece % kPieces) * units + piece / kPieces] = Format::order(value);
  }
}

// The product of one unit of 16 bytes of W per row.
template <class Format, class T, int M>
GM_DEVICE void multiply(const typename Format::Scales& scales, const u32x4 (&w)[kRows], const u32x4* kept,
                        int unit, int units, float (&sums)[M][kRows]) {
  constexpr int kPieces = Format::kWidth / 8;
  typename Format::template Sum<T, M> sum;
  sum.start();
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    gm::in_order();
    u32x4 x[M];
#pragma unroll
    for (int m = 0; m < M; ++m) x[m] = kept[(m * kPieces + j) * units + unit];
    sum.add(scales, w, j, x, sums);
  }
  sum.finish(scales, sums);
}

template <class Format, class T, int M>
GM_DEVICE void wv_splitk(const WvSplitKParams& p) {
  // Loads of W in flight, per row, as registers allow.
  constexpr int kUnroll = Format::kWidth == 8 ? (M <= 2 ? 4 : 2) : M <= 4 ? 2 : 1;
  u32x4* flag = gm::shared();
  u32x4* kept = flag + 1;
  const int lane = gm::thread() % GM_LANES, wave = gm::thread() / GM_LANES;
  const int split = gm::block_y(), start = split * p.per_split * p.chunk;
  const int stop = p.k < start + p.per_split * p.chunk ? p.k : start + p.per_split * p.chunk;
  const bool staged_once = stop - start <= p.chunk;
  const int half = p.n / 2, columns = p.silu_mul ? half : p.n;
  if (staged_once) {
    stage<Format, M>(p, kept, start, (stop - start) / Format::kWidth);
    gm::barrier();
  }
  for (int tile = gm::block_x(); tile < p.tiles; tile += p.blocks) {
    const int pair = tile * kWaves + wave;
    int64_t rows[kRows];
    const u32x4* from[kRows];
    for (int row = 0; row < kRows; ++row) {
      const int at = p.silu_mul ? (pair < half ? pair : half - 1) + row * half : kRows * pair + row;
      rows[row] = at < p.n ? at : p.n - 1;  // read in vain, not stored
      from[row] = static_cast<const u32x4*>(p.w) + rows[row] * (p.k / Format::kWidth);
    }
    float sums[M][kRows] = {};
    for (int first = start; first < stop; first += p.chunk) {
      const int units = ((stop - first < p.chunk) ? stop - first : p.chunk) / Format::kWidth;
      if (!staged_once) {
        gm::barrier();  // the previous chunk has been read
        stage<Format, M>(p, kept, first, units);
        gm::barrier();
      }
      const u32x4* w0 = from[0] + first / Format::kWidth;
      const u32x4* w1 = from[1] + first / Format::kWidth;
      int unit = lane;
      for (; unit + (kUnroll - 1) * GM_LANES < units; unit += kUnroll * GM_LANES) {
        u32x4 w[kUnroll][kRows];
        typename Format::Scales scales[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          w[i][0] = gm::load_once(w0 + unit + i * GM_LANES);
          w[i][1] = gm::load_once(w1 + unit + i * GM_LANES);
          scales[i].load(p, rows, first + (unit + i * GM_LANES) * Format::kWidth);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
          multiply<Format, T, M>(scales[i], w[i], kept, unit + i * GM_LANES, units, sums);
      }
      for (; unit < units; unit += GM_LANES) {
        const u32x4 w[kRows] = {gm::load_once(w0 + unit), gm::load_once(w1 + unit)};
        typename Format::Scales scales;
        scales.load(p, rows, first + unit * Format::kWidth);
        multiply<Format, T, M>(scales, w, kept, unit, units, sums);
      }
    }
    // Lane 2 m + row gets the sum of that token and row.
    float z = 0.0f;
#pragma unroll
    for (int i = 0; i < M * kRows; ++i) {
      float sum = sums[i / kRows][i % kRows];
#pragma unroll
      for (int mask = GM_LANES / 2; mask > 0; mask /= 2) sum += gm::shuffle_xor(sum, mask);
      z = lane == i ? sum : z;
    }
    if (p.splits > 1) {
      const int64_t slice = int64_t(p.tiles) * kWaves * M * kRows;
      float* sum = p.sums + (int64_t(tile) * kWaves + wave) * M * kRows + lane;
      if (lane < M * kRows) sum[split * slice] = z;
      gm::release();
      gm::barrier();
      if (gm::thread() == 0) (*flag)[0] = gm::count(p.counters + tile);
      gm::barrier();
      if ((*flag)[0] != uint32_t(p.splits - 1)) continue;
      gm::acquire();
      if (gm::thread() == 0) gm::reset(p.counters + tile);
      if (lane < M * kRows) {
        z = 0.0f;
        for (int i = 0; i < p.splits; ++i) z += sum[i * slice];
      }
    }
    const int m = lane / kRows, row = lane % kRows;
    const bool inside = m < M && m < p.m && (p.silu_mul ? pair < half : kRows * pair + row < p.n);
    if (inside && p.bias != nullptr)
      z += T::to_float(static_cast<const uint16_t*>(p.bias)[row == 0 ? rows[0] : rows[1]]);
    int column = kRows * pair + row;
    bool stores = inside;
    if (p.silu_mul) {
      const float up = gm::shuffle_xor(z, 1);
      z = z / (1.0f + gm::exponential(-z)) * up;
      column = pair, stores = inside && row == 0;
    }
    if (stores) {
      const int64_t at = int64_t(m) * columns + column;
      if (p.residual != nullptr) z += T::to_float(static_cast<const uint16_t*>(p.residual)[at]);
      static_cast<uint16_t*>(p.y)[at] = uint16_t(T::from_float(z));
    }
  }
}

#define GM_WV_KERNEL(format, type, tokens)                                          \
  GM_KERNEL_OF(kThreads) wv_splitk_##format##_##type##_##tokens(WvSplitKParams p) { \
    wv_splitk<format, gm::type, tokens>(p);                                         \
  }
GM_WV_KERNELS(GM_WV_KERNEL)

#endif
#if GM_HIP_HOST
#include "args.h"

#define GM_WV_ENTRY(format, type, tokens) GM_HIP_KERNEL(wv_splitk_##format##_##type##_##tokens),
static gm::HipKernel g_wv_splitk[] = {GM_WV_KERNELS(GM_WV_ENTRY)};

// y [m, n or n / 2] = x [m, k] W^T (+ bias, silu and product, + residual), m <= 8. GM_E_SHAPE where a chunk
// is no whole number of units, or K of no whole number of 16 bytes of W.
GM_HIP_ARGS(gm_linear_wv_splitk, GmLinearWvSplitKArgs)(const GmLinearWvSplitKArgs* args) {
  const GmLinearWvSplitKArgs& a = *args;
  if (a.format < 0 || a.format > 2 || (a.lanes != 32 && a.lanes != 64)) return GM_E_ARG;
  if (a.x_type != 1 && a.x_type != 2) return GM_E_DTYPE;
  const int widths[] = {8, 32, 16};
  const int width = widths[a.format];
  if (a.m < 0 || a.m > 8 || a.n < 1 || a.k < width || a.k % width || a.chunk < width || a.chunk % width)
    return GM_E_SHAPE;
  if (a.splits < 1 || a.per_split < 1 || a.blocks < 1 || a.tiles < 1) return GM_E_ARG;
  if (a.m == 0) return GM_OK;
  const int tokens = a.m <= 1 ? 0 : a.m <= 2 ? 1 : a.m <= 4 ? 2 : 3;
  const int kept = a.chunk < a.k ? a.chunk : a.k;
  gm::HipLaunch shape;
  shape.grid_x = unsigned(a.blocks < a.tiles ? a.blocks : a.tiles), shape.grid_y = unsigned(a.splits);
  shape.block = unsigned(kWaves * a.lanes), shape.lds = unsigned((1 << tokens) * kept * 2 + 16);
  if (shape.lds > (64u << 10)) return GM_E_SHAPE;  // a chunk that was chosen for fewer rows
  WvSplitKParams params{a.y,        a.x,           a.w,          a.scales,   a.zeros,  a.bias,
                        a.residual, a.sums,        a.counters,   a.ldx,      a.m,      a.n,
                        a.k,        a.chunk,       a.per_split,  a.splits,   a.tiles,  int(shape.grid_x),
                        a.groups,   a.group_shift, a.scale_type, a.silu_mul, a.vectors};
  void* arguments[] = {&params};
  return g_wv_splitk[(a.format * 2 + (a.x_type == 2 ? 0 : 1)) * 4 + tokens].launch(a.device, a.arch, a.stream,
                                                                                   shape, arguments);
}

#endif
