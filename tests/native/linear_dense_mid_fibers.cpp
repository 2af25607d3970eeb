// Dense products of a few dozen rows for Hopper on a CPU, with their entry, for test_linear_dense_mid_fibers.py.
#include "hopper_entry_fibers.h"

namespace gm {
inline void cluster_arrive_relaxed() { cluster_arrive(); }
}  // namespace gm

#include "linear/dense_mid_sm90/product.cuh"

#undef __CUDACC__
#include "linear/dense_mid_sm90/_linear_dense_mid_sm90.cu"

namespace {

using Program = gm::Program<gm::dense_mid::Params>;

template <typename T, class S>
void kernel(void* parameters) {
  gm::run_thread<Program::Call>(parameters, [](const Program::Call& call, uint8_t* smem) {
    gm::dense_mid::product<T, S>(*call.p, *call.first, *call.second, smem);
  });
}

#define GM_ROW(NAME, T, width, rows) \
  {"dense_mid_" #NAME "_" #width "x" #rows, kernel<T, gm::dense_mid::Shape<width, rows>>},
constexpr Program kPrograms[] = {GM_SHAPES(GM_ROW, fp16, __half) GM_SHAPES(GM_ROW, bf16, __nv_bfloat16)};

}  // namespace

int gm::CudaKernel::launch(int, void*, const Launch& shape, void** arguments) {
  return launch_program(kPrograms, name, shape, static_cast<const dense_mid::Params*>(arguments[0]),
                        arguments[1], arguments[2]);
}
