// Paged attention for Hopper and its entry on a CPU, for test_paged_sm90_fibers.py: some of its kernels.
#include "hopper_entry_fibers.h"

#include <type_traits>

inline float __fdividef(float a, float b) { return a / b; }

namespace gm {

uint2 e4m3_to_f16(uint32_t);  // caches of codes are not executed

}  // namespace gm

#include "../../kernels/attention/paged_attention/sm90/_paged_attention_sm90.cuh"

#undef __CUDACC__
#define gm_paged_attention_sm90 paged_on_cpu
#include "../../kernels/attention/paged_attention/sm90/_paged_attention_sm90.cu"

namespace {

struct Launched {
  const gm::AttentionParams* p;
  const CUtensorMap *q, *k, *v;
  const gm::SoftCap<true>* cap;
};

template <typename T, int D, gm::Copies COPIES, bool CAP, int GROUPS>
void kernel(void* parameters) {
  const Launched& call = *static_cast<Launched*>(parameters);
  if (gm::thread() == 0) {
    gm::fibers::clear(gm::AttentionShape<D, GROUPS>::kThreads);
    std::memset(gm::smem, 0xff, sizeof gm::smem);  // NaN
  }
  gm::block_sync();
  gm::SoftCap<CAP> cap{};
  if constexpr (CAP) cap = *call.cap;
  gm::paged_attention<T, D, COPIES, CAP, GROUPS>(*call.p, *call.q, *call.k, *call.v, cap);
}

struct Compiled {
  std::string_view name;
  void (*run)(void*);
};
constexpr Compiled kCompiled[] = {
    {"paged_attention_bf16_d64_boxes", kernel<__nv_bfloat16, 64, gm::kBoxCopies, false, 2>},
    {"paged_attention_bf16_d64_boxes_cap", kernel<__nv_bfloat16, 64, gm::kBoxCopies, true, 2>},
    {"paged_attention_bf16_d64_rows_cap", kernel<__nv_bfloat16, 64, gm::kRowCopies, true, 2>},
    {"paged_attention_bf16_d256_boxes", kernel<__nv_bfloat16, 256, gm::kBoxCopies, false, 2>},
    {"paged_attention_bf16_d256_boxes_cap", kernel<__nv_bfloat16, 256, gm::kBoxCopies, true, 2>},
    {"paged_prompts_bf16_d64", kernel<__nv_bfloat16, 64, gm::kBoxCopies, false, 3>},
};

}  // namespace

int gm::CudaKernel::launch(int, void*, const Launch& shape, void** arguments) {
  Launched call{static_cast<const AttentionParams*>(arguments[0]),
                static_cast<const CUtensorMap*>(arguments[1]), static_cast<const CUtensorMap*>(arguments[2]),
                static_cast<const CUtensorMap*>(arguments[3]),
                static_cast<const SoftCap<true>*>(arguments[4])};
  fibers::array = reinterpret_cast<char*>(smem);
  for (const Compiled& one : kCompiled)
    if (one.name == name) {
      if (!launch_grid(one.run, &call, int(shape.grid_x), int(shape.block), 16)) return GM_E_HANGS;
      const bool spilled =
          std::any_of(smem + shape.smem, smem + sizeof smem, [](uint8_t byte) { return byte != 0xff; });
      return spilled ? GM_E_MEMORY : GM_OK;
    }
  return GM_E_ARG;
}

// By TMA, since the library was loaded.
extern "C" int boxes_stored() { return int(gm::stored_boxes); }
