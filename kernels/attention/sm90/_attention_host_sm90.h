// Host helpers of attention's entries on Hopper: checks of strides, and TMA descriptors of tensors of heads.
#pragma once
#ifndef __CUDACC__
#include "gm_cuda.h"

namespace gm {

// Rows begin at multiples of 16 bytes. strides: in elements of `item` bytes.
inline bool rows_aligned(const void* base, const int64_t* strides, int count, int item) {
  bool fits = is_aligned(base);
  for (int i = 0; i < count; ++i) fits = fits && strides[i] * item % 16 == 0;
  return fits;
}
// The same, and no stride is negative: TMA supports none.
inline bool rows_copyable(const void* base, const int64_t* strides, int count, int item) {
  bool fits = rows_aligned(base, strides, count, item);
  for (int i = 0; i < count; ++i) fits = fits && strides[i] >= 0;
  return fits;
}

// Heads of 16-bit floats. sizes, box: as of tensor_map; strides: in elements. The stride of a dimension of one
// index is never used, but the driver checks it: it is replaced.
inline int heads_map(CUtensorMap* map, const void* base, bool bf16, unsigned rank, const cuuint64_t* sizes,
                     const int64_t* strides, const cuuint32_t* box) {
  cuuint64_t bytes[4];
  for (unsigned i = 0; i + 1 < rank; ++i)
    bytes[i] = (sizes[i + 1] == 1 ? sizes[0] : cuuint64_t(strides[i])) * 2;
  return tensor_map(map, float16_type(bf16), rank, base, sizes, bytes, box);
}

}  // namespace gm
#endif
