// The kernels of one weight format for sm_75, and their entry point: ../frag16_sm80/entry.h for other shapes, and for fp16
// alone.
//
// A source defines
//   GM_ENTRY              the exported function, gm_grouped_linear_<format>_sm75
//   GM_SM75_OPERANDS(K)   K(type of 16-bit scales or any, class of linear/frag16_sm80/operands.cuh) ...
//   GM_TILE_BYTES         of a tile
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "grouped.cuh"
#include "linear/frag16_sm75/shapes.h"

// Rows of x, warps, CTAs per multiprocessor; shapes.py has the same.
#if GM_TILE_BYTES <= 1280
#define GM_SM75_SHAPES(K, ...) \
  K(16, 4, 3, __VA_ARGS__)     \
  K(32, 4, 3, __VA_ARGS__)     \
  K(64, 4, 2, __VA_ARGS__)
#else
#define GM_SM75_SHAPES(K, ...) \
  K(16, 4, 2, __VA_ARGS__)     \
  K(32, 4, 2, __VA_ARGS__)     \
  K(64, 4, 1, __VA_ARGS__)
#endif

#include "moe/grouped_linear/frag16_sm80/entry.h"
