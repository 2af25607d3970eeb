// A store of 16 bytes to global memory.
#pragma once
#ifdef __CUDACC__

namespace gm {

// As PTX: the compiler would split an assignment under a condition into four stores.
__device__ __forceinline__ void store_16(void* to, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

}  // namespace gm
#endif
