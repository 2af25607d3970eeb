// In the place of kernels/_native/sm75/mma_int8.cuh: w8a8_fibers.cpp has what the product uses of it.
#pragma once
