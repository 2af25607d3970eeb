// Copies by cp.async whose rows may not exist.
#pragma once
#ifdef __CUDACC__
#include <cstdint>

namespace gm {

// 16 bytes from global to shared memory, or as many zeros, for which `src` is not read. The size is selected in the statement of the copy, so
// that ptxas sees that it is 16 or 0 and makes a predicate of it; for a size that comes from elsewhere it computes for any number of bytes.
__device__ __forceinline__ void cp_async_16_if(bool exists, uint32_t dst, const void* src) {
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      ".reg .b32 bytes;\n"
      "setp.ne.b32 exists, %2, 0;\n"
      "selp.b32 bytes, 16, 0, exists;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, bytes;\n"
      "}" ::"r"(dst),
      "l"(src), "r"(static_cast<int>(exists))
      : "memory");
}

// The same of what is `offset` bytes from `base`, zeros where that is negative: by its sign, which is a word of it.
__device__ __forceinline__ void cp_async_16_at(uint32_t dst, const char* base, int64_t offset) {
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      ".reg .b32 bytes;\n"
      "setp.ge.s32 exists, %2, 0;\n"
      "selp.b32 bytes, 16, 0, exists;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, bytes;\n"
      "}" ::"r"(dst),
      "l"(base + offset), "r"(static_cast<int>(offset >> 32))
      : "memory");
}

}  // namespace gm
#endif
