// In the place of kernels/_native/sm75/ptx.cuh: sm75_fibers.h has what primitives.cuh uses of it.
#pragma once
