// In the place of kernels/_native/sm90/tma.cuh: wgmma_fibers.h has what attention uses of it.
#pragma once
