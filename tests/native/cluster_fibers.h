// The device functions of kernels/sampling/_cluster_sm90.cuh for a CPU: every thread of a cluster is a fiber,
// which runs until it waits for others. Clusters follow each other.
//
// The order of threads changes with `order`: what one thread stores too early or reads too late depends on
// it. Shared memory begins poisoned. `fault` plants one fault: 1 = barriers of blocks do nothing, 2 =
// barriers of clusters do nothing, 3 = a block's memory is taken for its neighbour's.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define GM_DEVICE inline

struct float4 {
  float x, y, z, w;
};

namespace gm {

using std::max;
using std::min;

namespace fibers {

struct Fiber {
  ucontext_t context;
  void* place[5];  // where it stopped
  std::vector<char> stack;
  bool begun = false, done = false;
  long warp_waits = 0, block_waits = 0, cluster_waits = 0;  // how often it arrived
  long steps = 0;                                           // what else it did
  uint64_t given = 0;                                       // to the others of its warp
};
inline std::vector<Fiber> all;
inline std::vector<char> memory;  // of all blocks
inline size_t block_bytes = 0;
inline char poison = char(0xA5);  // what shared memory begins with
inline int current = 0, block_threads = 0, ranks = 0, order = 0, fault = 0;
// From this order on, blocks that are not the first of their cluster run every second time; from kSlowWarps on, warps with bit 2, or in odd
// orders bit 1, of their number every eighth time.
constexpr int kSlowRanks = 4, kSlowWarps = 6;
inline int64_t cluster = 0;
// Of who resumes fibers. Its name is in no other header: libraries of one process share such variables, whatever their types are.
inline void* home[5];
inline void (*body)(void*) = nullptr;
inline void* argument = nullptr;

// Jumps between stacks are those of the compiler: swapcontext calls the kernel each time.
[[noreturn, gnu::noinline]] inline void jump(void** to) { __builtin_longjmp(to, 1); }
[[gnu::noinline]] inline void yield() {
  if (!__builtin_setjmp(all[current].place)) jump(home);
}
[[gnu::noinline]] inline void resume(Fiber& fiber) {
  if (__builtin_setjmp(home)) return;
  if (fiber.begun) jump(fiber.place);
  fiber.begun = true;
  setcontext(&fiber.context);
}
inline void wait(int first, int count, long Fiber::* member, long turn) {
  for (int i = first; i < first + count; ++i)  // who has arrived once stays so
    while (!all[i].done && all[i].*member < turn) yield();
}
inline void meet_warp() { wait(current / 32 * 32, 32, &Fiber::warp_waits, ++all[current].warp_waits); }
inline void enter() {
  body(argument);
  all[current].done = true;
  jump(home);
}

// One cluster. False if threads wait for each other in vain.
inline bool run() {
  const int count = block_threads * ranks;
  std::fill(memory.begin(), memory.end(), poison);
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = all[i];
    fiber.begun = fiber.done = false,
    fiber.warp_waits = fiber.block_waits = fiber.cluster_waits = fiber.steps = 0;
    getcontext(&fiber.context);
    fiber.stack.resize(1 << 16);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, enter, 0);
  }
  for (int left = count, idle = 0, round = 0; left > 0; ++round) {
    long before = 0, after = 0;
    const int remaining = left;
    for (const Fiber& f : all) before += f.warp_waits + f.block_waits + f.cluster_waits + f.steps;
    for (int i = 0; i < count; ++i) {
      current = order == 0 ? i : order == 1 ? count - 1 - i : int((i * 37L + 11) % count);
      if (all[current].done || (order >= kSlowRanks && current >= block_threads && round % 2)) continue;
      if (order >= kSlowWarps && current % block_threads / 32 & (order % 2 ? 2 : 4) && round % 8) continue;
      resume(all[current]);
      left -= all[current].done;
    }
    for (const Fiber& f : all) after += f.warp_waits + f.block_waits + f.cluster_waits + f.steps;
    idle = before == after && left == remaining ? idle + 1 : 0;
    if (idle > (order >= kSlowWarps ? 16 : 2)) return false;
  }
  return true;
}

inline bool launch(void (*kernel)(void*), void* parameters, int64_t clusters, int blocks, int threads,
                   size_t bytes) {
  block_bytes = (bytes + 15) / 16 * 16;
  memory.resize(block_bytes * blocks + 16);
  all.resize(size_t(threads) * blocks);
  block_threads = threads, ranks = blocks, body = kernel, argument = parameters;
  for (cluster = 0; cluster < clusters; ++cluster)
    if (!run()) return false;
  return true;
}

}  // namespace fibers

inline int cluster_rank() { return fibers::current / fibers::block_threads; }
inline int cluster_ranks() { return fibers::ranks; }
inline int thread() { return fibers::current % fibers::block_threads; }
inline int threads() { return fibers::block_threads; }
inline int64_t block() { return fibers::cluster * fibers::ranks + cluster_rank(); }
inline void* shared() {
  char* start = fibers::memory.data() + (16 - reinterpret_cast<uintptr_t>(fibers::memory.data()) % 16) % 16;
  return start + cluster_rank() * fibers::block_bytes;
}
template <typename T>
T* mapa(T* own, int rank) {
  const int to = fibers::fault == 3 ? (rank + 1) % fibers::ranks : rank;
  return reinterpret_cast<T*>(reinterpret_cast<char*>(own) +
                              (to - cluster_rank()) * int64_t(fibers::block_bytes));
}

inline void warp_sync() { fibers::meet_warp(); }
inline void block_sync() {
  auto& own = fibers::all[fibers::current];
  if (fibers::fault == 1) return;
  const long turn = ++own.block_waits;
  fibers::wait(cluster_rank() * threads(), threads(), &fibers::Fiber::block_waits, turn);
}
inline void cluster_arrive() { ++fibers::all[fibers::current].cluster_waits; }
inline void cluster_wait() {
  if (fibers::fault == 2) return;
  fibers::wait(0, int(fibers::all.size()), &fibers::Fiber::cluster_waits,
               fibers::all[fibers::current].cluster_waits);
}
inline void cluster_sync() { cluster_arrive(), cluster_wait(); }
inline void griddepcontrol_wait() {}

// What all lanes of the warp give, in the order of lanes.
template <typename F>
auto of_warp(uint64_t value, F f) {
  fibers::all[fibers::current].given = value;
  fibers::meet_warp();
  const int base = fibers::current / 32 * 32;
  const auto result = f([base](int lane) { return fibers::all[base + lane].given; });
  fibers::meet_warp();
  return result;
}
inline int warp_max(int v) {
  return of_warp(uint64_t(int64_t(v)), [](auto given) {
    int most = int(int64_t(given(0)));
    for (int lane = 1; lane < 32; ++lane) most = max(most, int(int64_t(given(lane))));
    return most;
  });
}
inline uint32_t ballot(bool v) {
  return of_warp(v, [](auto given) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t(given(lane)) << lane;
    return bits;
  });
}
inline uint64_t shuffle_up(uint64_t v, int by) {
  const int lane = fibers::current % 32;
  return of_warp(v, [=](auto given) { return given(lane >= by ? lane - by : lane); });
}
inline uint64_t shuffle_xor(uint64_t v, int mask) {
  const int lane = fibers::current % 32;
  return of_warp(v, [=](auto given) { return given(lane ^ mask); });
}
inline int popcount(uint32_t v) { return __builtin_popcount(v); }

template <typename T>
T atomic_add(T* at, T v) {
  const T before = *at;
  *at += v;
  return before;
}
inline int atomic_add(int* at, int v) { return atomic_add<int>(at, v); }
inline void atomic_min(int* at, int v) { *at = min(*at, v); }

inline int bits_of(float v) {
  int bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline float float_of(int v) {
  float value;
  std::memcpy(&value, &v, 4);
  return value;
}
inline uint64_t bits_of(double v) {
  uint64_t bits;
  std::memcpy(&bits, &v, 8);
  return bits;
}
inline double double_of(uint64_t v) {
  double value;
  std::memcpy(&value, &v, 8);
  return value;
}
inline float load_one(const float* from) { return *from; }
inline float load_one(const uint16_t* from) { return float_of(int(uint32_t(*from) << 16)); }
inline float4 load_four(const float* from) { return {from[0], from[1], from[2], from[3]}; }
inline float4 load_four(const uint16_t* from) {
  return {load_one(from), load_one(from + 1), load_one(from + 2), load_one(from + 3)};
}
inline float quotient(float a, float b) { return a / b; }
inline float log2_approx(float v) { return std::log2(v); }

}  // namespace gm
