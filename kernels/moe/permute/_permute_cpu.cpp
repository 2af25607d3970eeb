// Entries sorted by expert; the meaning is in op.py.
// gm-levels: base neon
#include "moe/_moe_cpu.h"

GM_KERNEL(gm_moe_permute)(const int32_t* ids, int32_t* offsets, int32_t* permutation, int32_t* inverse,
                          int64_t entries, int64_t experts) {
  if (entries < 0 || entries > INT32_MAX || experts < 1) return GM_E_SHAPE;
  moe::sort_by_expert(ids, offsets, permutation, inverse, entries, experts);
  return GM_OK;
}
