// In the place of kernels/_native/sm90/store_16.cuh: grouped_dense_fibers.cpp has its function.
#pragma once
