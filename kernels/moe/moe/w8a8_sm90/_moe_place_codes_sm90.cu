// Copies given codes of tokens, with their scales, to every expert that the tokens are routed to: rows sorted
// by expert, as _moe_quantize_sm90.cu writes them. One CTA per token.
#include <cstdint>

#include "experts.h"
#include "gm_cuda.h"
#include "sm90/ptx.cuh"

struct MoePlaceParams {
  const uint8_t* from;        // [tokens, k], rows given_stride apart
  const float* given_scales;  // [tokens, groups]
  const int *ids, *inverse, *offsets;
  uint8_t* codes;  // [entries, k]
  float* scales;   // [entries], or by groups [groups, pitch]
  int64_t given_stride, row_stride, group_stride;
  int top_k, vectors, groups, pitch;  // groups: 0 = a scale per row
};

#ifdef __CUDACC__

extern "C" __global__ void __launch_bounds__(256)
    experts_place_codes(const __grid_constant__ MoePlaceParams p) {
  const int64_t token = blockIdx.x;
  const int* places = p.inverse + token * p.top_k;
  const uint4* from = reinterpret_cast<const uint4*>(p.from + token * p.given_stride);
  gm::griddepcontrol_wait();
  // After the wait, so that the next kernel may also read what earlier kernels wrote.
  gm::griddepcontrol_launch_dependents();
  for (int at = threadIdx.x; at < p.vectors; at += 256) {
    const uint4 word = __ldcg(from + at);
    for (int i = 0; i < p.top_k; ++i) {
      const int64_t place = __ldcg(places + i);
      if (place >= 0) reinterpret_cast<uint4*>(p.codes)[place * p.vectors + at] = word;
    }
  }
  const int count = p.groups ? p.groups : 1;
  for (int at = threadIdx.x; at < p.top_k * count; at += 256) {
    const int i = at / count, group = at - i * count, place = __ldcg(places + i);
    if (place < 0) continue;
    const float scale = __ldcg(p.given_scales + token * p.row_stride + group * p.group_stride);
    if (p.groups == 0) {
      p.scales[place] = scale;
    } else {
      const int expert = __ldcg(p.ids + token * p.top_k + i), start = __ldcg(p.offsets + expert);
      p.scales[static_cast<int64_t>(group) * p.pitch + gm::w8a8::scale_column(start, expert) + place -
               start] = scale;
    }
  }
}

#else
#include "args.h"

static gm::CudaKernel g_kernel{GM_CUBIN, "experts_place_codes"};

GM_CUDA_ARGS(gm_moe_place_codes_sm90, GmMoePlaceCodesArgs)(const GmMoePlaceCodesArgs* args) {
  const GmMoePlaceCodesArgs& a = *args;
  const int64_t entries = int64_t(a.tokens) * a.top_k, pitch = gm::w8a8::scale_pitch(entries, a.experts);
  if (a.tokens < 0 || a.top_k < 1 || entries > INT32_MAX || a.k < 1 || a.k % 16 || a.experts < 1)
    return GM_E_SHAPE;
  if (a.groups < 0 || pitch > INT32_MAX || a.given_stride % 16 || a.given_stride < a.k) return GM_E_SHAPE;
  if (!gm::is_aligned(a.given) || !gm::is_aligned(a.codes)) return GM_E_SHAPE;
  if (a.tokens == 0) return GM_OK;
  MoePlaceParams p{static_cast<const uint8_t*>(a.given),
                   a.given_scales,
                   a.ids,
                   a.inverse,
                   a.offsets,
                   static_cast<uint8_t*>(a.codes),
                   a.scales,
                   a.given_stride,
                   a.row_stride,
                   a.group_stride,
                   a.top_k,
                   a.k / 16,
                   a.groups,
                   int(pitch)};
  void* arguments[] = {&p};
  return g_kernel.launch(a.device, a.stream, {.grid_x = unsigned(a.tokens), .block = 256, .pdl = true},
                         arguments);
}

#endif
