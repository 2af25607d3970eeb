// In the place of kernels/_native/sm90/store_16.cuh: attention_fibers.h has its function.
#pragma once
