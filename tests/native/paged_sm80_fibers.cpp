// The schedules of paged attention for sm_80 on a CPU, for test_paged_sm80_fibers.py.
#include <type_traits>

#include "attention_fibers.h"

#include "../../kernels/attention/paged_attention/sm80/flash_codes.cuh"
#include "../../kernels/attention/paged_attention/sm80/shape.cuh"

namespace {

template <typename C, int D, int N, bool CAP>
void decode(void* parameters) {
  const auto& [p, cap] = *static_cast<std::pair<gm::DecodeParams, gm::SoftCap<true>>*>(parameters);
  if (gm::thread() == 0) std::memset(gm::smem, 0xa5, sizeof gm::smem);
  gm::block_sync();
  if constexpr (CAP)
    gm::paged_decode<C, D, N, true>(p, cap);
  else
    gm::paged_decode<C, D, N, false>(p, {});
}

}  // namespace

// A call as Python gives it: contiguous tensors, strides follow from the sizes, but for those of pages, in bytes.
struct PagedCall {
  const void *q, *k, *v;
  const int *table, *query_start, *seq_lens;
  void* out;
  float* lse;
  const float *sinks, *k_scale, *v_scale;  // scales of a head, or of all slots
  unsigned* counters;
  float* parts;
  int64_t k_block, v_block;
  int seqs, heads, kv_heads, head_dim, page, table_row, window, max_ctx;
  int codes, by_token, bf16, rows, ctas, tokens, keys;
  float scale, softcap;
  int order, fault;
};

namespace {

// As fill_params of sm90/_paged_decode_host_sm90.h.
void fill_params(const PagedCall& c, gm::DecodeParams* to) {
  gm::fibers::order = c.order, gm::fibers::fault = c.fault;
  gm::DecodeParams& p = *to;
  const int bytes = c.codes ? 1 : 2, row = c.kv_heads * c.head_dim, group = c.heads / c.kv_heads;
  p.out = c.out, p.lse = c.lse, p.sinks = c.sinks, p.table = c.table, p.query_start = c.query_start;
  p.seq_lens = c.seq_lens, p.counters = c.counters, p.parts = c.parts, p.q = c.q, p.k = c.k, p.v = c.v;
  p.q_head = c.head_dim * 2, p.q_token = c.heads * p.q_head;
  p.k_head = p.v_head = c.head_dim * bytes, p.k_slot = p.v_slot = row * bytes;
  p.k_block = c.k_block, p.v_block = c.v_block;
  p.table_row = c.table_row, p.out_head = c.head_dim, p.out_token = c.heads * c.head_dim;
  p.seqs = c.seqs, p.heads = c.heads, p.kv_heads = c.kv_heads, p.head_dim = c.head_dim, p.group = group;
  p.window = c.window, p.page = c.page;
  p.by_page = 0xffffffffu / unsigned(c.page), p.by_group = (65536 + group - 1) / group;
  p.score_scale = c.scale * 1.4426950408889634f,
  p.scale_log2 = c.codes || c.softcap > 0 ? 1.f : p.score_scale;
  p.k_scale = c.k_scale, p.v_scale = c.v_scale, p.by_token = c.by_token, p.bf16 = c.bf16;
  p.k_scale_head = p.v_scale_head = 1;
  if (c.by_token)
    p.k_scale_slot = p.v_scale_slot = c.kv_heads, p.k_scale_block = p.v_scale_block = c.page * c.kv_heads;
}

template <typename T, int D, bool CAP, int KEYS>
void flash(void* parameters) {
  const auto& [p, cap] = *static_cast<std::pair<gm::FlashParams, gm::SoftCap<true>>*>(parameters);
  uint8_t* memory = static_cast<uint8_t*>(gm::shared());
  if constexpr (CAP)
    gm::paged_flash<T, D, true, KEYS>(p, cap, memory);
  else
    gm::paged_flash<T, D, false, KEYS>(p, {}, memory);
}

}  // namespace

// 0; 1 if threads wait for each other in vain; 2 for an instance that is not compiled here.
extern "C" int decode_on_cpu(const PagedCall* call) {
  const PagedCall& c = *call;
  gm::fibers::array = reinterpret_cast<char*>(gm::smem);
  gm::DecodeParams p{};
  fill_params(c, &p);
  p.pieces = c.ctas / c.kv_heads, p.sequence_cost = c.seqs > 1 ? gm::kSequenceCost : 0;
  p.even = gm::even_pieces(c.seqs, p.pieces);
  std::pair<gm::DecodeParams, gm::SoftCap<true>> parameters{p,
                                                            gm::soft_cap(c.softcap, c.codes ? 0.f : c.scale)};
#define RUN(C, D, N, CAP)                                                                                \
  if (c.codes == (C::kBytes == 1) && c.head_dim == D && (c.rows > 8) == (N > 8) && c.softcap > 0 == CAP) \
    return !gm::launch_grid(decode<C, D, N, CAP>, &parameters, p.pieces * c.kv_heads,                    \
                            gm::DecodeShape<D, N, C::kBytes>::kThreads, 16);
  RUN(gm::Floats<Bf16>, 64, 16, true)
  RUN(gm::Floats<Bf16>, 256, 8, false)
  RUN(gm::Codes, 80, 8, false)
  RUN(gm::Codes, 256, 8, true)
#undef RUN
  return 2;
}

// As decode_on_cpu, of any batch.
extern "C" int flash_on_cpu(const PagedCall* call) {
  const PagedCall& c = *call;
  gm::fibers::array = nullptr;
  std::pair<gm::FlashParams, gm::SoftCap<true>> parameters{{}, gm::soft_cap(c.softcap, c.scale)};
  gm::FlashParams& p = parameters.first;
  fill_params(c, &p);
#define RUN(T, D, CAP, KEYS)                                                                                \
  if (c.head_dim == D && c.softcap > 0 == CAP && c.bf16 == std::is_same_v<T, Bf16> && c.keys == KEYS) {     \
    const int64_t grid =                                                                                    \
        gm::plan_flash(&p, gm::FlashShape<D, false, KEYS>::kRows, c.tokens, c.ctas, c.max_ctx);             \
    return !gm::launch_grid(flash<T, D, CAP, KEYS>, &parameters, int(grid), 128, gm::kFlashBytes<D, KEYS>); \
  }
  RUN(Bf16, 128, false, 32)
  RUN(Bf16, 128, false, 64)
  RUN(__half, 128, true, 64)
  RUN(__half, 64, true, 32)
  RUN(Bf16, 256, false, 32)
#undef RUN
  return 2;
}

namespace {

template <typename T, int D, bool CAP>
void flash_more(void* parameters) {
  const auto& [p, cap] = *static_cast<std::pair<gm::FlashParams, gm::SoftCap<true>>*>(parameters);
  uint8_t* memory = static_cast<uint8_t*>(gm::shared());
  gm::SoftCap<CAP> own{};
  if constexpr (CAP) own = cap;
  if (p.k_scale == nullptr) {
    if constexpr (D == 96 || D == 192) gm::paged_flash_padded<T, D, CAP>(p, own, memory);
  } else if constexpr (D != 192) {
    gm::paged_flash_codes<T, D, CAP>(p, own, memory);
  }
}

}  // namespace

// As flash_on_cpu, over codes and of other head sizes.
extern "C" int flash_more_on_cpu(const PagedCall* call) {
  const PagedCall& c = *call;
  gm::fibers::array = nullptr;
  std::pair<gm::FlashParams, gm::SoftCap<true>> parameters{{},
                                                           gm::soft_cap(c.softcap, c.codes ? 0.f : c.scale)};
  gm::FlashParams& p = parameters.first;
  fill_params(c, &p);
#define RUN(T, D, CAP)                                                                                     \
  if ((c.head_dim == 80 ? 96 : c.head_dim) == D && c.softcap > 0 == CAP &&                                 \
      c.bf16 == std::is_same_v<T, Bf16>) {                                                                 \
    const int64_t grid = gm::plan_flash(&p, gm::FlashShape<D, false>::kRows, c.tokens, c.ctas, c.max_ctx); \
    return !gm::launch_grid(flash_more<T, D, CAP>, &parameters, int(grid), 128, gm::kFlashBytes<D>);       \
  }
  RUN(__half, 64, true)
  RUN(Bf16, 96, false)
  RUN(Bf16, 128, false)
  RUN(__half, 192, true)
  RUN(Bf16, 256, false)
#undef RUN
  return 2;
}

// All codes in fp16, or in bf16: out [256].
extern "C" void decode_codes(uint16_t* out, int bf16) {
  for (uint32_t i = 0; i < 256; i += 4) {
    const uint32_t four = i | i + 1 << 8 | i + 2 << 16 | i + 3 << 24;
    const uint2 pairs = bf16 ? gm::code_pairs<Bf16>(four) : gm::code_pairs<__half>(four);
    std::memcpy(out + i, &pairs, 8);
  }
}
