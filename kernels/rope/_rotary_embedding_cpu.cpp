// Rotary position embedding of queries and keys, in place.
#include "_rotate_heads_cpu.h"

// q [tokens, q_heads, >= rot] and k likewise (null: none), strides in elements, heads contiguous;
// positions [tokens]; cos_sin [rows, rot]: rot/2 cosines, then rot/2 sines.
// interleaved: neighbours are pairs, else halves.
GM_KERNEL(gm_rotary_embedding)(void* q, int64_t q_token_stride, int64_t q_head_stride, int64_t q_heads,
                               void* k, int64_t k_token_stride, int64_t k_head_stride, int64_t k_heads,
                               const int64_t* positions, const float* cos_sin, int64_t rows, int64_t tokens,
                               int64_t rot, int interleaved, int dtype) {
  if (tokens < 0 || rot < 2 || rot % 2 != 0 || q_heads < 0 || k_heads < 0 ||
      (tokens > 0 && k == nullptr && k_heads != 0))
    return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, {
    const int64_t grain = 8192 / ((q_heads + k_heads) * rot + 1) + 1;
    return gm::parallel_for(tokens, grain, [=](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t p = positions[t];
        const float* row = p >= 0 && p < rows ? cos_sin + p * rot : nullptr;
        gm::rotate_heads(static_cast<T*>(q) + t * q_token_stride, q_head_stride, q_heads, row, rot,
                         interleaved != 0);
        if (k_heads)
          gm::rotate_heads(static_cast<T*>(k) + t * k_token_stride, k_head_stride, k_heads, row, rot,
                           interleaved != 0);
      }
    });
  })
}
