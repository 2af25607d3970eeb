// In the place of kernels/_native/sm89/mma_fp8.cuh: w8a8_fibers.cpp has what the product uses of it.
#pragma once
