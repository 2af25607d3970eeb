// Latent attention for sm_80 on a CPU, for test_mla_sm80_fibers.py.
#include <type_traits>

#include "attention_fibers.h"

#include "../../kernels/attention/mla_attention/sm80/merge.cuh"

// A call as Python gives it: contiguous tensors.
struct MlaCall {
  const void *q, *cache;
  const int *table, *query_start, *seq_lens;
  void* out;
  float* lse;
  gm::mla80::Record* records;
  float* parts;
  int seqs, tokens, heads, page, table_row, max_q, max_ctx, bf16;
  int ctas, least, whole;
  float scale;
  int order, fault;
};

namespace {

template <typename T, int TILES>
void attend(void* parameters) {
  gm::mla80::attend<T, TILES>(*static_cast<gm::mla80::Params*>(parameters),
                              static_cast<uint8_t*>(gm::shared()));
}
template <typename T, int TILES>
void merge(void* parameters) {
  gm::mla80::merge<T, TILES>(*static_cast<gm::mla80::Params*>(parameters));
}

template <typename T, int TILES>
int run(const MlaCall& c, gm::mla80::Params& p) {
  using S = gm::mla80::Shape<TILES>;
  const int grid = int(gm::mla80::plan(&p, S::kRows, c.max_q, c.max_ctx, c.ctas, c.whole));
  if (!gm::launch_grid(attend<T, TILES>, &p, grid, S::kThreads, S::kBytes)) return -1;
  if (p.pieces >= 2 && !gm::launch_grid(merge<T, TILES>, &p, grid * (S::kRows / gm::mla80::kMergeWarps),
                                        gm::mla80::kMergeWarps * 32, 0))
    return -1;
  return p.pieces;
}

}  // namespace

// The pieces that the contexts were cut into, 0 where they are whole; -1 if threads wait for each other in vain.
extern "C" int mla_on_cpu(const MlaCall* call) {
  const MlaCall& c = *call;
  gm::fibers::order = c.order, gm::fibers::fault = c.fault;
  gm::mla80::Params p{};
  p.out = c.out, p.lse = c.lse, p.q = c.q, p.cache = c.cache;
  p.table = c.table, p.query_start = c.query_start, p.seq_lens = c.seq_lens;
  p.records = c.records, p.parts = c.parts;
  p.q_head = p.cache_slot = 576, p.q_token = 576 * c.heads, p.cache_block = 576 * c.page;
  p.out_head = 512, p.out_token = 512 * c.heads, p.table_row = c.table_row;
  p.seqs = c.seqs, p.tokens = c.tokens, p.heads = c.heads, p.page = c.page, p.least = c.least;
  p.by_page = 0xffffffffu / unsigned(c.page), p.by_heads = 0xffffffffu / unsigned(c.heads);
  p.scale_log2 = c.scale * 1.4426950408889634f;
  const bool one = (c.max_q < c.tokens ? c.max_q : c.tokens) * c.heads <= 16;
  if (c.bf16) return one ? run<Bf16, 1>(c, p) : run<Bf16, 2>(c, p);
  return one ? run<__half, 1>(c, p) : run<__half, 2>(c, p);
}
