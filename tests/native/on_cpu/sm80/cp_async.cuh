// In the place of kernels/_native/sm80/cp_async.cuh.
#pragma once
#include <cstdint>

namespace gm {

inline void cp_async_16_if(bool exists, uint32_t to, const void* from) {
  cp_async_16(to, from, exists ? 16 : 0);
}
inline void cp_async_16_at(uint32_t to, const char* base, int64_t offset) {
  cp_async_16(to, base + offset, offset < 0 ? 0 : 16);
}

}  // namespace gm
