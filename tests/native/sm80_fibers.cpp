// The schedules gemm and grouped for sm_80 on a CPU, for test_sm80_fibers.py.
#include "sm80_fibers.h"

#include "../../kernels/linear/frag16_sm80/gemm.cuh"
#include "../../kernels/moe/grouped_linear/frag16_sm80/grouped.cuh"

using Weights = gm::PlainOperand<4>;
#define SHAPES(F) F(16, 4, 5, 3) F(32, 4, 3, 2) F(64, 4, 5, 3) F(128, 8, 3, 2)

#include "tile_fibers.h"
