// Entries sorted by expert; the meaning is in op.py.
// gm-levels: base neon
#include "calls/permute.h"
#include "moe/_moe_cpu.h"

GM_CPU_CALL(gm_moe_permute, Permute)(const GmPermuteCall& call) {
  const int64_t entries = call.m * call.top_k;
  if (entries < 0 || entries > INT32_MAX || call.experts < 1) return GM_E_SHAPE;
  moe::sort_by_expert(static_cast<const int32_t*>(call.ids), static_cast<int32_t*>(call.expert_offsets),
                      static_cast<int32_t*>(call.permutation), static_cast<int32_t*>(call.inverse), entries,
                      call.experts);
  return GM_OK;
}
