// Quantizes rows of experts to 8 bits, sorted by expert: tokens, quantized once and copied to every expert
// that they are routed to, and silu(gate) * up of the first product's rows. The rules of
// quant/activations.py: e4m3 with a scale for each row, or for each 128 columns.
#include <cstdint>

#include "experts.h"
#include "gm_cuda.h"
#include "sm90/quantize_rows.cuh"

struct MoeQuantizeParams {
  const uint16_t* x;  // tokens [m, k] with rows ldx apart; or gate and up [entries, 2 k]
  const int *ids, *inverse, *offsets;
  uint8_t* codes;  // [entries, k]
  float* scales;   // [entries], or by groups [groups, pitch]
  int64_t ldx;
  int m, top_k, k, experts, pitch;  // m: tokens, or entries
};

#ifdef __CUDACC__

namespace {

using namespace gm::quantize;

// silu(gate) * up in float32, rounded to the type of the rows.
template <bool HALF>
__device__ __forceinline__ uint4 gated(const uint4& gate, const uint4& up) {
  float g[kVector], u[kVector];
  widen<HALF>(gate, g), widen<HALF>(up, u);
  uint32_t r[4];
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float low = __fdividef(g[i], 1.f + __expf(-g[i])) * u[i],
                high = __fdividef(g[i + 1], 1.f + __expf(-g[i + 1])) * u[i + 1];
    r[i / 2] = gm::packed<std::conditional_t<HALF, __half, __nv_bfloat16>>(low, high);
  }
  return make_uint4(r[0], r[1], r[2], r[3]);
}

// Calls each(place, expert) for the entries of a token that are routed to experts of this rank.
template <typename F>
__device__ __forceinline__ void over_places(const MoeQuantizeParams& p, int64_t token, const F& each) {
  constexpr int kStoreColumns = 4;
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kStoreColumns) {
    int place[kStoreColumns], expert[kStoreColumns];
#pragma unroll
    for (int i = 0; i < kStoreColumns; ++i) {
      const bool there = first + i < p.top_k;
      place[i] = there ? __ldcg(p.inverse + token * p.top_k + first + i) : -1;
      expert[i] = there ? __ldcg(p.ids + token * p.top_k + first + i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kStoreColumns; ++i)
      if (place[i] >= 0) each(place[i], expert[i]);
  }
}

// A scale for each row: one CTA per token, or per entry of ids if GATED.
template <bool HALF, bool GATED>
__device__ __forceinline__ void quantize_rows(const MoeQuantizeParams& p) {
  const int vectors = p.k / kVector;
  int64_t row = blockIdx.x;
  if constexpr (GATED) {
    gm::griddepcontrol_wait();
    // After the wait, so that the next kernel may also read what earlier kernels wrote.
    gm::griddepcontrol_launch_dependents();
    row = __ldcg(p.inverse + blockIdx.x);
    if (row < 0) return;
  }
  const uint4* x = reinterpret_cast<const uint4*>(p.x + row * p.ldx);
  const auto vector_at = [&](int at) {
    if constexpr (GATED)
      return gated<HALF>(__ldcg(x + at), __ldcg(x + vectors + at));
    else
      return x[at];
  };
  uint4 kept[kKept];
  load_row(kept, vectors, vector_at);
  const float scale = row_scale<HALF, false>(kept, vectors, vector_at);
  const auto write = [&](int64_t place) {
    int unused = 0;
    write_codes<HALF, false>(reinterpret_cast<uint2*>(p.codes + place * p.k), kept, vectors, vector_at, scale,
                             unused);
    if (threadIdx.x == 0) p.scales[place] = scale;
  };
  if constexpr (GATED) {
    write(row);
  } else {
    gm::griddepcontrol_wait();
    // After the wait, so that the next kernel may also read what earlier kernels wrote.
    gm::griddepcontrol_launch_dependents();
    over_places(p, row, [&](int place, int) { write(place); });
  }
}

// A scale for 128 columns, by sixteen lanes, of a token, or of an entry of ids if GATED.
template <bool HALF, bool GATED>
__device__ __forceinline__ void quantize_groups(const MoeQuantizeParams& p) {
  const Group at(p.m, p.k);
  const int64_t item = at.row;
  uint4 word = make_uint4(0, 0, 0, 0);
  int64_t row = item;
  if constexpr (GATED) {
    gm::griddepcontrol_wait();
    // After the wait, so that the next kernel may also read what earlier kernels wrote.
    gm::griddepcontrol_launch_dependents();
    row = item < p.m ? __ldcg(p.inverse + item) : -1;
    if (at.here && row >= 0) {
      const uint4* gate = reinterpret_cast<const uint4*>(p.x + row * p.ldx + at.column);
      word = gated<HALF>(__ldcg(gate), __ldcg(gate + p.k / kVector));
    }
  } else if (at.here) {
    word = *reinterpret_cast<const uint4*>(p.x + row * p.ldx + at.column);
  }
  const float scale = group_scale<HALF>(word);
  int unused = 0;
  const uint2 codes = codes_of<HALF, false>(word, scale, unused);
  const auto write = [&](int place, int expert) {
    if (at.here) *reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(place) * p.k + at.column) = codes;
    if (at.lane == 0) {
      const int start = __ldcg(p.offsets + expert);
      p.scales[static_cast<int64_t>(at.group) * p.pitch + gm::w8a8::scale_column(start, expert) + place -
               start] = scale;
    }
  };
  if constexpr (GATED) {
    if (row >= 0) write(static_cast<int>(row), __ldcg(p.ids + item));
  } else {
    gm::griddepcontrol_wait();
    // After the wait, so that the next kernel may also read what earlier kernels wrote.
    gm::griddepcontrol_launch_dependents();
    if (item < p.m) over_places(p, item, write);
  }
}

}  // namespace

#define GM_KERNELS(type, half)                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                                \
      experts_quantize_token_##type(const __grid_constant__ MoeQuantizeParams p) {      \
    quantize_rows<half, false>(p);                                                      \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                \
      experts_quantize_g128_##type(const __grid_constant__ MoeQuantizeParams p) {       \
    quantize_groups<half, false>(p);                                                    \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                \
      experts_silu_quantize_token_##type(const __grid_constant__ MoeQuantizeParams p) { \
    quantize_rows<half, true>(p);                                                       \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                \
      experts_silu_quantize_g128_##type(const __grid_constant__ MoeQuantizeParams p) {  \
    quantize_groups<half, true>(p);                                                     \
  }
GM_KERNELS(fp16, true)
GM_KERNELS(bf16, false)

#else
#include "args.h"

namespace {
// [gated][by groups][bf16]
gm::CudaKernel g_kernels[2][2][2] = {
    {{{GM_CUBIN, "experts_quantize_token_fp16"}, {GM_CUBIN, "experts_quantize_token_bf16"}},
     {{GM_CUBIN, "experts_quantize_g128_fp16"}, {GM_CUBIN, "experts_quantize_g128_bf16"}}},
    {{{GM_CUBIN, "experts_silu_quantize_token_fp16"}, {GM_CUBIN, "experts_silu_quantize_token_bf16"}},
     {{GM_CUBIN, "experts_silu_quantize_g128_fp16"}, {GM_CUBIN, "experts_silu_quantize_g128_bf16"}}}};
}  // namespace

GM_CUDA_ARGS(gm_moe_quantize_sm90, GmMoeQuantizeArgs)(const GmMoeQuantizeArgs* args) {
  const GmMoeQuantizeArgs& a = *args;
  if (a.type != 1 && a.type != 2) return GM_E_DTYPE;
  const int64_t entries = int64_t(a.tokens) * a.top_k, pitch = gm::w8a8::scale_pitch(entries, a.experts);
  if (a.tokens < 0 || a.top_k < 1 || entries > INT32_MAX || a.k < 1 || a.k % 16 || a.experts < 1)
    return GM_E_SHAPE;
  if (a.ldx % 8 || a.ldx < (a.gated ? 2 * int64_t(a.k) : a.k) || !gm::is_aligned(a.x)) return GM_E_SHAPE;
  const int64_t items = a.gated ? entries : a.tokens, threads = items * ((a.k + 127) / 128) * 16;
  if (pitch > INT32_MAX || (threads + 255) / 256 > INT32_MAX) return GM_E_SHAPE;
  if (a.tokens == 0) return GM_OK;
  MoeQuantizeParams p{static_cast<const uint16_t*>(a.x),
                      a.ids,
                      a.inverse,
                      a.offsets,
                      static_cast<uint8_t*>(a.codes),
                      a.scales,
                      a.ldx,
                      int(items),
                      a.top_k,
                      a.k,
                      a.experts,
                      int(pitch)};
  void* arguments[] = {&p};
  return g_kernels[a.gated != 0][a.groups != 0][a.type - 1].launch(
      a.device, a.stream,
      {.grid_x = a.groups ? unsigned((threads + 255) / 256) : unsigned(items), .block = 256, .pdl = true},
      arguments);
}

#endif
