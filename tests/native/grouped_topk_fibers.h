// What kernels/moe/grouped_topk/_rows.cuh asks of a warp and of the processor, for a CPU: every lane is a fiber (cluster_fibers.h).
//
// `fault` plants one fault: 4 = warps do not wait, 5 = reductions leave out half of the lanes, 6 = shuffles give back the own value,
// 7 = ballots see no other lane.
#pragma once
#include <limits>

#include "cluster_fibers.h"

namespace gm {

struct Half {
  _Float16 value;
};
struct Bfloat16 {
  uint16_t bits;
};

inline int lane() { return thread() % 32; }
inline int warp() { return thread() / 32; }
inline int64_t first_row(int warps) { return block() * warps; }

// Those of _warp.cuh that differ from cluster_fibers.h, or that it does not have.
namespace topk {

inline int in_register(int v) { return v; }
inline void warp_sync() {
  if (fibers::fault != 4) gm::warp_sync();
}
inline uint32_t ballot(bool v) { return fibers::fault == 7 ? gm::ballot(v) & 1u << lane() : gm::ballot(v); }
inline uint32_t shuffle(uint32_t v, int from) {
  const auto given = of_warp(v, [=](auto given) { return given(from); });
  return fibers::fault == 6 ? v : uint32_t(given);
}
inline uint32_t shuffle_xor(uint32_t v, int mask) {
  const auto given = of_warp(v, [=](auto given) { return given(lane() ^ mask); });
  return fibers::fault == 6 ? v : uint32_t(given);
}
inline uint32_t warp_max(uint32_t v) {
  return uint32_t(of_warp(v, [](auto given) {
    uint64_t most = 0;
    for (int i = fibers::fault == 5 ? 16 : 0; i < 32; ++i) most = max(most, given(i));
    return most;
  }));
}
inline uint32_t bits_of(float v) { return uint32_t(gm::bits_of(v)); }
inline float float_of(uint32_t v) { return gm::float_of(int(v)); }
inline float exponential(float v) { return std::exp(v); }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float larger(float a, float b) { return std::fmax(a, b); }
// A unit in the last place too small.
inline float reciprocal_approx(float v) { return std::nextafter(1 / v, 0.f); }

inline float load_one(const float* from) { return *from; }
inline float load_one(const Half* from) { return float(from->value); }
inline float load_one(const Bfloat16* from) { return float_of(uint32_t(from->bits) << 16); }
// NaN where the address does not allow so large a load.
template <int N, typename T>
void load(float (&v)[N], const T* from) {
  const bool aligned = reinterpret_cast<uintptr_t>(from) % (N * sizeof(T)) == 0;
  for (int i = 0; i < N; ++i) v[i] = aligned ? load_one(from + i) : std::numeric_limits<float>::quiet_NaN();
}
inline void keep_four(float* to, float a, float b, float c, float d) {
  to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}

}  // namespace topk
}  // namespace gm
