// The schedule gemm_ws of linear over frag16 tiles on a CPU, with its entry and its decoders, for test_gemm_ws_fibers.py, which names the
// format and the instances: GM_BITS, GM_TILE_BYTES, GM_FLAG_BYTES, GM_DECODERS and GM_INSTANCES(K) as CMake does (cmake/frag16_sm90.cmake).
#include "hopper_entry_fibers.h"
#include "numbers_fibers.h"

inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, int by) {
  return uint32_t((uint64_t(high) << 32 | low) << (by & 31) >> 32);
}
inline uint32_t __vsubus4(uint32_t a, uint32_t b) {
  uint32_t r = 0;
  for (int i = 0; i < 32; i += 8) r |= uint32_t(std::max(int(a >> i & 255) - int(b >> i & 255), 0)) << i;
  return r;
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(__bfloat162float(a.x) * __bfloat162float(b.x),
                               __bfloat162float(a.y) * __bfloat162float(b.y));
}
inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 v) { return {v.x, v.x}; }
inline __nv_bfloat162 __high2bfloat162(__nv_bfloat162 v) { return {v.y, v.y}; }
inline __half2 __low2half2(__half2 v) { return {v.x, v.x}; }
inline __half2 __high2half2(__half2 v) { return {v.y, v.y}; }
inline float __low2float(__nv_bfloat162 v) { return __bfloat162float(v.x); }
inline float __high2float(__nv_bfloat162 v) { return __bfloat162float(v.y); }

namespace gm {

template <int WORDS>
void ld_shared(uint32_t (&v)[WORDS], uint32_t from) {
  std::memcpy(v, fibers::memory_at(from), sizeof v);
}
inline void st_cluster(uint32_t to, float4 v) { st_shared(to, v); }
inline uint64_t l2_evict_normal() { return 0; }
inline uint64_t l2_evict_first() { return 1; }
inline void prefetch_l2(const void*) {}
inline uint32_t ld_acquire(const uint32_t* from) { return *from; }
inline void st_release(uint32_t* to, uint32_t value) { *to = value; }

}  // namespace gm

// The decoders, with the pairs of bf16 in the place of PTX.
#define pair_fma pair_fma_of_ptx
#define pair_mul pair_mul_of_ptx
#include "decoders_mma.cuh"
#undef pair_fma
#undef pair_mul

namespace gm {

inline uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16) {
  using Number = Num<__nv_bfloat16>;
  const auto one = [&](int high) {
    return float(double(Number::half(a, high)) * Number::half(b, high) + Number::half(c, high));
  };
  return packed<__nv_bfloat16>(one(0), one(1));
}
inline uint32_t pair_mul(uint32_t a, uint32_t b, __nv_bfloat16) { return pair_fma(a, b, 0x80008000u, {}); }
// Only bf16 is executed.
uint32_t pair_fma(uint32_t, uint32_t, uint32_t, __half);
uint32_t pair_mul(uint32_t, uint32_t, __half);

}  // namespace gm

#include "gemm_ws.cuh"

namespace gm {
GM_DECODERS
}  // namespace gm

#undef __CUDACC__
#define GM_ENTRY gemm_ws_on_cpu
#define GM_SCHEDULE GM_GEMM_WS
#include "entry.h"

namespace {

using Program = gm::Program<gm::GemmParams>;

template <typename W, bool GATED, int... SHAPE>
void kernel(void* parameters) {
  gm::run_thread<Program::Call>(parameters, [](const Program::Call& call, uint8_t* smem) {
    gm::linear_gemm_ws<W, GATED, SHAPE...>(*call.p, *call.first, *call.second, smem);
  });
}

#define GM_PROGRAM(name, x_type, scale_type, T, W, mt, c, slices, ctas, xs4, xs8, ws4, ws8, chains, pending) \
  {#name, kernel<W, false, mt, c, slices, ctas, GM_SLOTS(xs4, xs8), GM_SLOTS(ws4, ws8), chains, pending>},   \
      {#name "_gated",                                                                                       \
       kernel<W, true, mt, c, slices, ctas, GM_SLOTS(xs4, xs8), GM_SLOTS(ws4, ws8), chains, pending>},
constexpr Program kPrograms[] = {GM_INSTANCES(GM_PROGRAM)};

}  // namespace

int gm::CudaKernel::launch(int, void*, const Launch& shape, void** arguments) {
  return launch_program(kPrograms, name, shape, static_cast<const GemmParams*>(arguments[0]), arguments[1],
                        arguments[2]);
}
