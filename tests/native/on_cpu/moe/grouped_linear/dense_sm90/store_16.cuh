// In the place of kernels/moe/grouped_linear/dense_sm90/store_16.cuh.
#pragma once

namespace gm::dense {

inline void store_16(void* to, uint4 words) { std::memcpy(to, &words, 16); }

}  // namespace gm::dense
