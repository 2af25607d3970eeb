// The grid of products of experts, for their entries.
#pragma once
#include <cstdint>

#include "gm_cuda.h"

namespace gm {

// Tiles of `height` rows that the rows of all experts have at most, for each of `blocks` along N: each expert may have
// one partial tile.
inline int64_t most_expert_tiles(int rows, int experts, int height, int blocks) {
  const int64_t high = int64_t(ceil_div(rows, height)) + experts;
  return (high < rows ? high : rows) * blocks;
}

}  // namespace gm
