// Attention over dense sequences for Hopper on a CPU, for test_varlen_sm90_fibers.py.
#include "wgmma_fibers.h"

#include "../../kernels/attention/varlen_attention/sm90/_varlen_attention_sm90.cuh"

// A call as Python gives it: contiguous tensors.
struct VarlenCall {
  const uint16_t *q, *k, *v;
  const int *query_start, *context_start;
  void* out;
  float* lse;
  int tokens, seqs, rows, heads, kv_heads, qk_dim, v_dim, left, right, ctas;
  float scale;
  int order;
  long tiles;  // of keys that were copied
};

namespace {

struct Launch {
  gm::VarlenParams p;
  CUtensorMap q, k, v;
};

template <typename T, int DK, int DV, bool WINDOW>
void kernel(void* parameters) {
  const auto& [p, q, k, v] = *static_cast<Launch*>(parameters);
  if (gm::thread() == 0) {
    gm::fibers::clear(384);
    std::memset(gm::smem, 0xff, sizeof gm::smem);  // NaN
  }
  gm::block_sync();
  gm::varlen_attention<T, DK, DV, WINDOW>(p, q, k, v);
}

}  // namespace

// 0; 1 if threads wait for each other in vain; 2 for an instance that is not compiled here.
extern "C" int varlen_on_cpu(VarlenCall* call) {
  const VarlenCall& c = *call;
  gm::fibers::order = c.order;
  gm::fibers::array = reinterpret_cast<char*>(gm::smem);
  gm::fibers::boxes.clear();
  gm::VarlenParams p{};
  p.out = c.out, p.lse = c.lse, p.query_start = c.query_start, p.context_start = c.context_start;
  p.out_head = c.v_dim, p.out_token = int64_t(c.heads) * c.v_dim;
  p.seqs = c.seqs, p.heads = c.heads, p.group = c.heads / c.kv_heads, p.v_dim = c.v_dim;
  p.left = c.left, p.right = c.right, p.scale_log2 = c.scale * 1.4426950408889634f;
  Launch launch{p,
                {c.q, c.qk_dim, c.heads, c.tokens, c.qk_dim, int64_t(c.heads) * c.qk_dim},
                {c.k, c.qk_dim, c.kv_heads, c.rows, c.qk_dim, int64_t(c.kv_heads) * c.qk_dim},
                {c.v, c.v_dim, c.kv_heads, c.rows, c.v_dim, int64_t(c.kv_heads) * c.v_dim}};
  const int tiles = (c.tokens / 128 + c.seqs) * c.heads, grid = tiles < c.ctas ? tiles : c.ctas;
#define RUN(DK, DV, WINDOW)                                                                           \
  if (c.qk_dim <= DK && c.v_dim <= DV && (c.left >= 0 || c.right != 0) == WINDOW) {                   \
    const bool ended = gm::launch_grid(kernel<__nv_bfloat16, DK, DV, WINDOW>, &launch, grid, 384, 0); \
    call->tiles = gm::fibers::boxes[reinterpret_cast<uint64_t>(&launch.k)] / (DK / 64);               \
    return !ended;                                                                                    \
  }
  RUN(64, 64, true)
  RUN(128, 128, true)
  RUN(192, 128, true)
  RUN(192, 128, false)
#undef RUN
  return 2;
}
