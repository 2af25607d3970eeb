// Layout of the scales of 128 columns of x for rows sorted by expert.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define GM_BOTH __host__ __device__ __forceinline__
#else
#define GM_BOTH inline
#endif

namespace gm::w8a8 {

// The first float of expert `expert` in a row of scales, whose rows begin at `start`: a multiple of four, as
// copies of 16 bytes need, behind the last one of the expert before, and known without the other experts.
GM_BOTH int scale_column(int start, int expert) { return (start + 3) / 4 * 4 + 4 * expert; }

// Floats of a row of scales.
GM_BOTH int64_t scale_pitch(int64_t rows, int experts) { return (rows + 3) / 4 * 4 + 4 * int64_t(experts); }

}  // namespace gm::w8a8
#undef GM_BOTH
