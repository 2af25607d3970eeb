// The product of int8 weights and activations for sm_80, and the quantizer of x, on a CPU, for test_w8a8_fibers.py.
#include "attention_fibers.h"

// Of the functions for Hopper, what the sources use is here or in attention_fibers.h: without __CUDACC__ the header is empty, and stays it.
#undef __CUDACC__
#include "../../kernels/_native/sm90/ptx.cuh"
#define __CUDACC__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float __half2float(__half v) { return gm::Num<__half>::to_float(v); }
inline float __bfloat162float(__nv_bfloat16 v) { return gm::Num<__nv_bfloat16>::to_float(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float v) { return int(std::nearbyint(v)); }
template <typename T>
T __ldg(const T* from) {
  return *from;
}

namespace gm {

// Element `byte` of a register of four signed bytes.
inline int byte_of(uint32_t word, int byte) { return int8_t(word >> byte * 8); }
// d += a b for 16 x 32 by 32 x 8, in the layout of mma.m16n8k32. A planted fault, 5, takes b's halves for each other.
inline void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int base = fibers::current / 32 * 32, lane = fibers::current % 32, g = lane / 4, t = lane % 4;
  auto& own = fibers::registers[fibers::current];
  for (int i = 0; i < 4; ++i) own[i] = a[i];
  own[4] = b0, own[5] = b1;
  warp_sync();
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 32; ++k) {
      const int quad = k % 16 / 4, half = k / 16;
      const uint32_t left = fibers::registers[base + row % 8 * 4 + quad][row / 8 + half * 2];
      const uint32_t right = fibers::registers[base + column * 4 + quad][4 + (half ^ (fibers::fault == 5))];
      d[i] += byte_of(left, k % 4) * byte_of(right, k % 4);
    }
  }
  warp_sync();
}
inline uint16_t packed_e4m3(float, float) { return 0; }  // of other formats than int8

}  // namespace gm

#include "../../kernels/linear/w8a8_sm80/_quantize_int8_sm80.cu"
#include "../../kernels/linear/w8a8_sm80/product.cuh"

#define SHAPES(F) F(16, 4, 128, 4) F(32, 4, 128, 4) F(64, 8, 64, 4) F(128, 4, 64, 4) F(128, 8, 64, 4)

namespace {

template <int MT, int WN, int KB, int SLOTS>
void product(void* parameters) {
  gm::w8a8::Product<MT, WN, KB, SLOTS>(*static_cast<gm::w8a8::Params*>(parameters),
                                       static_cast<uint8_t*>(gm::shared()))
      .run();
}
template <bool HALF>
void quantize(void* parameters) {
  quantize_row_to_int8<HALF>(*static_cast<QuantizeInt8Params*>(parameters));
}

}  // namespace

// 0; 1 if threads wait for each other in vain; 2 for a shape that is none of the above. y [m, n], x [m, ldx], w [n, k].
extern "C" int w8a8_on_cpu(const void* w, const void* x, void* y, const float* x_scale, const void* w_scale,
                           const void* bias, const void* residual, uint32_t* counters, int32_t* sums,
                           int64_t ldx, int m, int n, int k, int half, int w_type, int mt, int warps,
                           int grid, int share, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  gm::w8a8::Params p{};
  p.w = static_cast<const uint8_t*>(w), p.x = static_cast<const uint8_t*>(x), p.y = y;
  p.x_scale = x_scale, p.w_scale = w_scale, p.bias = bias, p.residual = residual, p.counters = counters;
  p.sums = sums, p.ldx = ldx, p.m = m, p.n = n, p.k = k, p.half = half, p.w_type = w_type;
  p.high = (m + mt - 1) / mt, p.vectors = n % 8 == 0;
#define RUN(MT, WN, KB, SLOTS)                                                                           \
  if (mt == MT && warps == WN) {                                                                         \
    p.groups = (k + KB - 1) / KB;                                                                        \
    p.blocks = p.whole = p.high * ((n + WN * 32 - 1) / (WN * 32));                                       \
    const int rest = p.blocks % grid;                                                                    \
    if (share && rest * p.groups >= grid) p.whole -= rest;                                               \
    return !gm::launch_grid(product<MT, WN, KB, SLOTS>, &p, grid, WN * 32, SLOTS * (MT + WN * 32) * KB); \
  }
  SHAPES(RUN)
#undef RUN
  return 2;
}

// codes [m, k] and scales [m] of x [m, k], rows ldx apart.
extern "C" int quantize_on_cpu(const uint16_t* x, uint8_t* codes, float* scales, int64_t ldx, int m, int k,
                               int half, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  QuantizeInt8Params p{x, codes, scales, ldx, k};
  return !gm::launch_grid(half ? quantize<true> : quantize<false>, &p, m, 256, 0);
}
