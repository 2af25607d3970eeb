// Decodes of paged attention for Hopper and their entry on a CPU, for test_paged_sm90_fibers.py: some of the kernels without a cap.
#include "hopper_entry_fibers.h"

namespace gm {

uint2 e4m3_to_f16(uint32_t);  // caches of codes are not executed

}  // namespace gm

#include "../../kernels/attention/paged_attention/sm90/_paged_decode_sm90.cuh"

#undef __CUDACC__
#define gm_paged_decode_sm90 decode_on_cpu
#include "../../kernels/attention/paged_attention/sm90/_paged_decode_sm90.cu"

namespace {

template <typename T, int D, int N, int WARPS = 4>
void kernel(void* parameters) {
  if (gm::thread() == 0) std::memset(gm::smem, 0xff, sizeof gm::smem);  // NaN
  gm::block_sync();
  gm::paged_decode<gm::Floats<T>, D, N, false, WARPS>(*static_cast<gm::DecodeParams*>(parameters), {});
}

struct Compiled {
  std::string_view name;
  void (*run)(void*);
};
constexpr Compiled kCompiled[] = {
    {"paged_decode_bf16_d64", kernel<__nv_bfloat16, 64, 8>},
    {"paged_decode_bf16_d64_wide", kernel<__nv_bfloat16, 64, 8, 8>},
    {"paged_decode_bf16_d64_rows16", kernel<__nv_bfloat16, 64, 16>},
    {"paged_decode_bf16_d64_rows16_wide", kernel<__nv_bfloat16, 64, 16, 8>},
    {"paged_decode_bf16_d80_rows16", kernel<__nv_bfloat16, 80, 16>},
    {"paged_decode_bf16_d256", kernel<__nv_bfloat16, 256, 8>},
};

}  // namespace

extern "C" int gm_paged_decode_softcap_sm90(const gm::DecodeParams*, const gm::SoftCap<true>*, int, int, int,
                                            const gm::Launch*, int, void*) {
  return GM_E_ARG;
}

int gm::CudaKernel::launch(int, void*, const Launch& shape, void** arguments) {
  fibers::array = reinterpret_cast<char*>(smem);
  for (const Compiled& one : kCompiled)
    if (one.name == name)
      return launch_grid(one.run, arguments[0], int(shape.grid_x), int(shape.block), 16) ? GM_OK : GM_E_HANGS;
  return GM_E_ARG;
}
