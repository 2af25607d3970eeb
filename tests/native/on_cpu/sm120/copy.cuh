// In the place of kernels/_native/sm120/copy.cuh: block_scaled_fibers.cpp has what the product uses of it.
#pragma once
