// In the place of kernels/_native/sm90/mma.cuh: sm80_fibers.h has what the tiles use of it.
#pragma once
