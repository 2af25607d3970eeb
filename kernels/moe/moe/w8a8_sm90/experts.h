// Layout of the scales of 128 columns of x for rows sorted by expert.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define GM_BOTH __host__ __device__ __forceinline__
#else
#define GM_BOTH inline
#endif

namespace gm::w8a8 {

// The first float of expert `expert` in a row of scales; its rows of x begin at `start`. A multiple of four, as 16-byte
// copies need, past the floats of the expert before, and computed without the other experts' offsets.
GM_BOTH int scale_column(int start, int expert) { return (start + 3) / 4 * 4 + 4 * expert; }

// Floats of a row of scales.
GM_BOTH int64_t scale_pitch(int64_t rows, int experts) { return (rows + 3) / 4 * 4 + 4 * int64_t(experts); }

}  // namespace gm::w8a8
#undef GM_BOTH
