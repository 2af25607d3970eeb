// Stores tokens into a paged cache of e4m3 codes, with given scales per head, or with computed ones per token and head
// (kv_cache/quantized.py has the rules).
// gm-levels: base avx2 avx512 neon
#include "_cache_scales_cpu.h"
#include "_quantize_row_cpu.h"
#include "calls/reshape_and_cache.h"

namespace {

// Keys, or values, of width elements; strides in elements.
struct Rows {
  const void* source;
  const int64_t* source_stride;
  void* cache;
  const int64_t* cache_stride;
  void* scale;
  const int64_t* scale_stride;
  int64_t width;
};

template <class T>
int store_quantized(const GmReshapeAndCacheCall& call, const Rows& rows) {
  const int64_t* slots = static_cast<const int64_t*>(call.slot_mapping);
  for (int64_t t = 0; t < call.t; ++t)
    if (slots[t] >= call.blocks * call.block_size) return GM_E_ARG;
  const gm::ScaleStrides scale_stride = gm::scale_strides(call, rows.scale_stride);
  const bool token_scales = gm::has_token_scales(call);
  const int64_t grain = 16384 / (call.h * rows.width + 1) + 1;
  return gm::parallel_for(call.t, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (slots[t] < 0) continue;
      const int64_t block = slots[t] / call.block_size, slot = slots[t] % call.block_size;
      gm::f8e4m3* codes =
          static_cast<gm::f8e4m3*>(rows.cache) + block * rows.cache_stride[0] + slot * rows.cache_stride[1];
      float* scales = static_cast<float*>(rows.scale) + block * scale_stride.block + slot * scale_stride.slot;
      for (int64_t h = 0; h < call.h; ++h) {
        const T* row =
            static_cast<const T*>(rows.source) + t * rows.source_stride[0] + h * rows.source_stride[1];
        float* scale = scales + h * scale_stride.head;
        if (token_scales) *scale = gm::row_scale(row, rows.width);
        gm::quantize_row(row, codes + h * rows.cache_stride[2], rows.width, *scale);
      }
    }
  });
}

}  // namespace

// Scales per head are read, those per token and head written. GM_E_ARG, and nothing written, if a slot is past the
// cache.
GM_CPU_CALL(gm_cache_store_e4m3, ReshapeAndCache)(const GmReshapeAndCacheCall& call) {
  if (call.t < 0 || call.h < 0 || call.d < 0 || call.dv < 0 || call.blocks < 0 || call.block_size < 1)
    return GM_E_SHAPE;
  const Rows keys{call.key,     call.key_stride,     call.key_cache, call.key_cache_stride,
                  call.k_scale, call.k_scale_stride, call.d};
  const Rows values{call.value,   call.value_stride,   call.value_cache, call.value_cache_stride,
                    call.v_scale, call.v_scale_stride, call.dv};
  GM_DISPATCH_FLOAT(call.x_type, T, {
    const int code = store_quantized<T>(call, keys);
    return code ? code : store_quantized<T>(call, values);
  })
}
