// Rotary position embedding of queries and keys, in place.
#include "_rotate_heads_cpu.h"
#include "calls/rotary_embedding.h"

// A row of cos_sin: rot/2 cosines, then rot/2 sines. interleaved: GPT-J's pairs, else GPT-NeoX's.
GM_CPU_CALL(gm_rotary_embedding, RotaryEmbedding)(const GmRotaryEmbeddingCall& call) {
  if (call.t < 0 || call.rot < 2 || call.rot % 2 != 0 || call.hq < 0 || call.hk < 0 ||
      (call.t > 0 && call.k == nullptr && call.hk != 0))
    return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    const int64_t grain = 8192 / ((call.hq + call.hk) * call.rot + 1) + 1;
    return gm::parallel_for(call.t, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t p = static_cast<const int64_t*>(call.positions)[t];
        const float* row = p >= 0 && p < call.positions_count
                               ? static_cast<const float*>(call.cos_sin) + p * call.rot
                               : nullptr;
        gm::rotate_heads(static_cast<T*>(call.q) + t * call.q_stride[0], call.q_stride[1], call.hq, row,
                         call.rot, call.interleaved != 0);
        if (call.hk)
          gm::rotate_heads(static_cast<T*>(call.k) + t * call.k_stride[0], call.k_stride[1], call.hk, row,
                           call.rot, call.interleaved != 0);
      }
    });
  })
}
