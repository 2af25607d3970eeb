// cp.async of fewer than 16 bytes.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
namespace gm {

// 4 or 8 bytes from global to shared memory, or as many zeros.
template <int BYTES>
__device__ __forceinline__ void cp_async_small(uint32_t dst, const void* src, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(BYTES),
               "r"(valid ? BYTES : 0)
               : "memory");
}

}  // namespace gm
#endif
