// In the place of kernels/_native/sm90/wgmma.cuh: wgmma_fibers.h has what attention uses of it.
#pragma once
