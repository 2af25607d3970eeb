// The scales of a cache of e4m3 codes, [scale_blocks, scale_slots, scale_heads] (kv_cache/quantized.py).
#pragma once
#include "gm_cpu.h"

namespace gm {
namespace {

// Strides in elements: 0 along dimensions that share a scale.
struct ScaleStrides {
  int64_t block, slot, head;
};

template <class Call>
ScaleStrides scale_strides(const Call& call, const int64_t* stride) {
  return {call.scale_blocks > 1 ? stride[0] : 0, call.scale_slots > 1 ? stride[1] : 0,
          call.scale_heads > 1 ? stride[2] : 0};
}

// Whether there is a scale per token and head; else per head, or one.
template <class Call>
bool has_token_scales(const Call& call) {
  return call.scale_blocks * call.scale_slots > 1;
}

}  // namespace
}  // namespace gm
