// The exported function of a source of this folder: checks the types, finds the instance, runs it. GM_ENTRY is its name.
#pragma once
#include "args.h"
#include "gm_cuda.h"

// y [m, n] = x [m, k] . W^T (times row_scale [n]) + bias + residual. Returns GM_OK, or an error.
GM_CUDA_ARGS(GM_ENTRY, GmLinearFrag16Sm80Args)(const GmLinearFrag16Sm80Args* args) {
  if ((args->x_type != 1 && args->x_type != 2) || args->scale_type < 0 || args->scale_type > 2)
    return GM_E_DTYPE;
  Instance* one = find(*args);
  return one == nullptr ? GM_E_ARG : run(*args, *one);
}
