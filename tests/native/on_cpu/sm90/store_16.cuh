// In the place of kernels/_native/sm90/store_16.cuh: hopper_entry_fibers.h has its function.
#pragma once
