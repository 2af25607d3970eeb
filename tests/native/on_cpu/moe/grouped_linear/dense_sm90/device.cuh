// In the place of kernels/moe/grouped_linear/dense_sm90/device.cuh: grouped_dense_fibers.cpp has what it has.
#pragma once
