// In the place of kernels/_native/sm120/mma_block_scale.cuh: block_scaled_fibers.cpp has the instruction.
#pragma once
#include "sm120/block_formats.h"
