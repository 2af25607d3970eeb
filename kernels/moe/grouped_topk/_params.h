// What a launch of grouped top-k gets, and how it follows from a call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <iterator>

namespace gm::topk {

constexpr int kMaxExperts = 1024, kMaxGroups = 32, kWarps = 4;  // warps of a block at most

struct Params {
  const void* logits;  // rows `stride` elements apart
  const float* bias;   // [experts], or null
  float* weights;      // [rows, top_k]
  int32_t* ids;        // [rows, top_k]
  int64_t rows, stride;
  int experts, top_k;
  int first;         // the expert whose id is 0
  int groups, kept;  // groups: 1 if all are kept
  int group_size;
  int lanes_shift;  // 1 << lanes_shift whole lanes have the experts of a group; -1: no such number
  int scan_shift;   // 1 << scan_shift lanes read a group from shared memory
  int vectors;  // 1: loads of several logits, and of four biases, are aligned; lanes have kEach experts or none
  int sigmoid, renormalize;
  float scale;
};

// Neighbouring experts that a lane has, of so many: few sizes, so that few kernels are compiled.
#define GM_TOPK_SIZES(macro, name, type) \
  macro(name, type, 4) macro(name, type, 8) macro(name, type, 12) macro(name, type, 16) macro(name, type, 32)
// Those of every type of logits.
#define GM_TOPK_KERNELS(macro)       \
  GM_TOPK_SIZES(macro, fp32, float)  \
  GM_TOPK_SIZES(macro, fp16, __half) \
  GM_TOPK_SIZES(macro, bf16, __nv_bfloat16)
#define GM_TOPK_SIZE(name, type, each) each,
constexpr int kSizes[] = {GM_TOPK_SIZES(GM_TOPK_SIZE, , )};
#undef GM_TOPK_SIZE
constexpr int size_of(int64_t experts) {
  int i = 0;
  while (32 * kSizes[i] < experts) ++i;
  return i;
}

// Of the Scratch of a warp whose lanes have so many experts.
constexpr size_t scratch_bytes(int each) {
  return 32 * size_t(each) * (2 * sizeof(float) + sizeof(uint16_t));
}

// Whether so many experts can be chosen of so many, and the kernels do so.
template <typename Call>
bool is_choice(const Call& call) {
  return call.e >= 1 && call.e <= kMaxExperts && call.n_group >= 1 && call.e % call.n_group == 0 &&
         call.topk_group >= 1 && call.topk_group <= call.n_group &&
         (call.topk_group == call.n_group || call.n_group <= kMaxGroups) && call.top_k >= 1 &&
         call.top_k <= call.e / call.n_group * call.topk_group;
}

// The parameters for a call that is valid, with ids from the first expert's on. bytes: of a logit.
template <typename Call>
Params params_of(const Call& call, int bytes) {
  const int each = kSizes[size_of(call.e)], groups = call.topk_group < call.n_group ? int(call.n_group) : 1;
  Params p{};
  p.logits = call.logits, p.bias = static_cast<const float*>(call.bias);
  p.weights = static_cast<float*>(call.weights), p.ids = static_cast<int32_t*>(call.ids);
  p.rows = call.m, p.stride = call.logits_stride[0];
  p.experts = int(call.e), p.top_k = int(call.top_k);
  p.groups = groups, p.kept = groups > 1 ? int(call.topk_group) : 1, p.group_size = int(call.e) / groups;
  p.lanes_shift = -1;
  for (int shift = 0; shift <= 5; ++shift)
    if (p.group_size == each << shift) p.lanes_shift = shift;
  p.scan_shift = 5;
  while (groups << p.scan_shift > 32) --p.scan_shift;
  const int load = each % (16 / bytes) ? each % (16 / bytes) : 16 / bytes;
  const auto at = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  p.vectors = p.experts % each == 0 && p.stride % load == 0 && at(p.logits) % (load * bytes) == 0 &&
              at(p.bias) % 16 == 0;
  p.sigmoid = call.scoring == Call::Scoring::sigmoid, p.renormalize = call.renormalize != 0;
  p.scale = float(call.scale);
  return p;
}

}  // namespace gm::topk
