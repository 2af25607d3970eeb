// The device side of the HIP kernels (kernels/_native/gm_hip_device.h) for a CPU: every lane of a workgroup
// is a fiber, which runs until it waits at a barrier or shuffle. Workgroups follow each other. A lane that
// waits for lanes that never come is reported.
//
// The order of lanes and workgroups changes with `order`: what one lane stores too early or reads too late
// depends on it. LDS and scratch begin poisoned. `fault` plants one fault: 1 = barriers do nothing, 2 = a
// shuffle reads another lane, 3 = the counter of a split is not restored.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef uint32_t u32x4 __attribute__((vector_size(16)));

#define GM_DEVICE inline
#define GM_KERNEL_OF(threads) static void
#define GM_HIP_KERNEL(name) {[](void* p) { gm::fibers::call(name, p); }}

namespace gm {
namespace fibers {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  long wave_waits = 0, group_waits = 0;  // how often it arrived at a shuffle, at a barrier
};
inline std::vector<Fiber> lanes;
inline std::vector<float> slots;
inline std::vector<u32x4> lds;
inline ucontext_t scheduler;
inline int current = 0, block_x = 0, block_y = 0, order = 0, fault = 0;
inline bool stuck = false;

inline void yield() { swapcontext(&lanes[current].context, &scheduler); }

// Waits until every lane of [first, first + count) has arrived as often, by `member`.
inline void meet(int first, int count, long Fiber::* member) {
  const long turn = ++(lanes[current].*member);
  for (;;) {
    bool all = true;
    for (int i = first; i < first + count && all; ++i) all = lanes[i].*member >= turn;
    if (all) return;
    yield();
  }
}
inline void meet_wave() { meet(current / GM_LANES * GM_LANES, GM_LANES, &Fiber::wave_waits); }

template <class Params>
void call(void (*kernel)(Params), void* params) {
  kernel(*static_cast<Params*>(params));
}

inline void (*body)(void*) = nullptr;
inline void* argument = nullptr;
inline void enter() {
  body(argument);
  lanes[current].done = true;
}

// One workgroup.
inline bool run(int block) {
  for (int i = 0; i < block; ++i) {
    Fiber& fiber = lanes[i];
    fiber.done = false, fiber.wave_waits = fiber.group_waits = 0;
    getcontext(&fiber.context);
    fiber.stack.resize(1 << 16);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  for (int left = block, idle = 0; left > 0;) {
    long before = 0, after = 0;
    const int remaining = left;
    for (int i = 0; i < block; ++i) before += lanes[i].wave_waits + lanes[i].group_waits;
    for (int i = 0; i < block; ++i) {
      current = order == 0   ? i
                : order == 1 ? block - 1 - i
                             : (i * 37 + 11) % block;  // 37 and the sizes of blocks are coprime
      if (lanes[current].done) continue;
      swapcontext(&scheduler, &lanes[current].context);
      left -= lanes[current].done;
    }
    for (int i = 0; i < block; ++i) after += lanes[i].wave_waits + lanes[i].group_waits;
    idle = before == after && left == remaining ? idle + 1 : 0;
    if (idle > 2) return false;
  }
  return true;
}

}  // namespace fibers

inline int thread() { return fibers::current; }
inline int block_x() { return fibers::block_x; }
inline int block_y() { return fibers::block_y; }
inline u32x4* shared() { return fibers::lds.data(); }
inline void barrier() {
  if (fibers::fault != 1) fibers::meet(0, int(fibers::lanes.size()), &fibers::Fiber::group_waits);
}
inline void release() {}
inline void acquire() {}
inline uint32_t count(uint32_t* at) { return (*at)++; }
inline void reset(uint32_t* at) {
  if (fibers::fault != 3) *at = 0;
}
inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float shuffle_xor(float value, int mask) {
  const int lane = fibers::current;
  fibers::slots[lane] = value;
  fibers::meet_wave();
  const float other = fibers::slots[lane ^ (fibers::fault == 2 && mask == 2 ? 4 : mask)];
  fibers::meet_wave();
  return other;
}
inline u32x4 load_once(const u32x4* at) { return *at; }
inline void in_order() {}
inline float exponential(float x) { return std::exp(x); }
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }

struct Half {
  static float to_float(uint32_t bits) {
    const float sign = bits & 0x8000u ? -1.0f : 1.0f;
    const int exponent = int(bits >> 10 & 31), mantissa = int(bits & 1023);
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign *
           (exponent ? std::ldexp(float(1024 + mantissa), exponent - 25) : std::ldexp(float(mantissa), -24));
  }
  static uint32_t from_float(float value) {  // to nearest even
    const uint32_t sign = float_to_bits(value) >> 16 & 0x8000u;
    const float size = std::fabs(value);
    if (size != size) return 0x7E00u;
    if (size >= 65520.0f) return sign | 0x7C00u;
    int exponent = 0;
    std::frexp(size, &exponent);
    if (exponent < -13 || size == 0.0f) exponent = -13;
    // 11 bits: the first stands for the exponent.
    const int whole = int(std::nearbyint(std::ldexp(size, 11 - exponent)));
    return sign | uint32_t(whole + ((exponent + 13) << 10));
  }
  static float dot2(uint32_t a, uint32_t b, float sum) {
    sum = fused(to_float(a & 0xFFFF), to_float(b & 0xFFFF), sum);
    return fused(to_float(a >> 16), to_float(b >> 16), sum);
  }
  static uint32_t minus(uint32_t a, uint32_t b) {
    const uint32_t low = from_float(to_float(a & 0xFFFF) - to_float(b & 0xFFFF));
    return low | from_float(to_float(a >> 16) - to_float(b >> 16)) << 16;
  }
};

struct Bf16 {
  static float to_float(uint32_t bits) { return bits_to_float(bits << 16); }
  static uint32_t from_float(float value) {
    const uint32_t bits = float_to_bits(value);
    if (value != value) return 0x7FC0u;
    return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  }
  static float dot2(uint32_t a, uint32_t b, float sum) {
    sum = fused(to_float(a & 0xFFFF), to_float(b & 0xFFFF), sum);
    return fused(bits_to_float(a & 0xFFFF0000u), bits_to_float(b & 0xFFFF0000u), sum);
  }
};

// A kernel that launch() executes here and now. GM_E_ARG if lanes wait for each other in vain.
class HipKernel {
 public:
  constexpr HipKernel(void (*body)(void*)) : body_(body) {}
  int launch(int, const char*, void*, const HipLaunch& shape, void** arguments) {
    fibers::lanes.resize(shape.block);
    fibers::slots.resize(shape.block);
    fibers::body = body_, fibers::argument = arguments[0];
    const int groups = int(shape.grid_x * shape.grid_y);
    for (int i = 0; i < groups; ++i) {
      const int group = fibers::order == 1 ? groups - 1 - i : i;
      fibers::block_x = group % int(shape.grid_x), fibers::block_y = group / int(shape.grid_x);
      fibers::lds.assign((shape.lds + 15) / 16, u32x4{0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u});
      if (!fibers::run(int(shape.block))) return GM_E_ARG;
    }
    return GM_OK;
  }

 private:
  void (*body_)(void*);
};

}  // namespace gm

// Orders 0, 1, 2 of lanes, and of workgroups; faults as above.
extern "C" __attribute__((visibility("default"))) void gm_fibers_set(int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
}
