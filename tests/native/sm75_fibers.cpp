// The schedules for sm_75 on a CPU, for test_sm75_fibers.py.
#include "sm75_fibers.h"

#include "../../kernels/linear/frag16_sm75/gemm.cuh"
#include "../../kernels/linear/frag16_sm80/decode.cuh"
#include "../../kernels/moe/grouped_linear/frag16_sm75/grouped.cuh"

using Weights = gm::PlainOperand<4, __half>;
#define SHAPES(F) F(16, 4, 2, 1) F(32, 4, 2, 1) F(64, 8, 2, 1)

#include "tile_fibers.h"

namespace {

// Weights in fp16, times 4, as `Weights` has them: by lane, and with a scale of 2 for the sums of a group.
struct Plain {
  static constexpr int kBytes = Weights::kBytes, kGroups = 1;
  static constexpr float kFactor = 0.125f;
  const uint8_t* tile;
  int lane;
  void load(const uint8_t* from, int of_lane) { tile = from, lane = of_lane; }
  void pairs(int step, uint32_t (&a)[4]) const {
    for (int i = 0; i < 4; ++i)
      std::memcpy(&a[i], tile + (lane / 4 + i % 2 * 8) * 256 + step * 32 + i / 2 * 16 + lane % 4 * 4, 4);
  }
  float2 scale(int, int) const { return {2, 2}; }
};
// The same less 0.5, as formats of GGUF have minimums.
struct Less : Plain {
  using Tile = Less;
  static constexpr int kGroups = 4;
  static constexpr float kFactor = 512;
  float2 scale(int, int) const { return {1 / 2048.f, 1 / 2048.f}; }
  float2 offset(int, int) const { return {0.5f, 0.5f}; }
};

template <typename W, int RT, int WK, int PF>
void decode(void* parameters) {
  if (gm::thread() == 0) std::memset(gm::smem, 0xa5, sizeof gm::smem);
  gm::block_sync();
  gm::linear_decode<__half, W, 1, RT, WK, 2, PF>(*static_cast<gm::DecodeParams*>(parameters));
}

}  // namespace

// As gemm_on_cpu; rows of x need not be aligned. less: of all weights 0.5 is subtracted.
extern "C" int decode_on_cpu(const void* w, const void* x, void* y, const void* bias, const void* residual,
                             const float* row_scale, uint32_t* counters, float* sums, int64_t ldx, int m,
                             int n, int k, int rt, int wk, int split, int less, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  gm::fibers::array = reinterpret_cast<char*>(gm::smem);
  gm::DecodeParams p{};
  p.w = static_cast<const uint8_t*>(w), p.x = x, p.y = y, p.bias = bias, p.residual = residual;
  p.row_scale = row_scale, p.counters = counters, p.sums = sums, p.ldx = ldx, p.m = m, p.n = n, p.k = k;
  p.tiles = (n + 15) / 16, p.groups = (k + 127) / 128;
  p.xaligned = ldx % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const auto run = [&](void (*kernel)(void*)) {
    const bool done = gm::launch_grid(kernel, &p, (p.tiles + rt - 1) / rt, wk * 32, 16, split);
    gm::fibers::array = nullptr;
    return int(!done);
  };
  if (rt == 1 && wk == 8) return run(less ? decode<Less, 1, 8, 2> : decode<Plain, 1, 8, 2>);
  if (rt == 2 && wk == 4) return run(less ? decode<Less, 2, 4, 1> : decode<Plain, 2, 4, 1>);
  if (rt == 4 && wk == 4) return run(less ? decode<Less, 4, 4, 1> : decode<Plain, 4, 4, 1>);
  return 2;
}
