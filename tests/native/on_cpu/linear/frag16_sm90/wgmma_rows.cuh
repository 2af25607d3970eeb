// In the place of kernels/linear/frag16_sm90/wgmma_rows.cuh: wgmma_fibers.h has products of any width.
#pragma once
