// In the place of kernels/_native/sm90/tma_store_3d.cuh: hopper_entry_fibers.h has it.
#pragma once
