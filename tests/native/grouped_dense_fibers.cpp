// Experts of dense weights for Hopper on a CPU, with their entry, for test_grouped_dense_fibers.py.
#include "hopper_entry_fibers.h"

#include "moe/grouped_linear/dense_sm90/product.cuh"

#undef __CUDACC__
#define GM_ENTRY grouped_dense_on_cpu
#define GM_NAME(rest) rest
#define GM_TYPE __nv_bfloat16
#define GM_BF16 1
#include "moe/grouped_linear/dense_sm90/entry.h"

namespace {

using Program = gm::Program<gm::dense::Params>;

template <class S>
void kernel(void* parameters) {
  gm::run_thread<Program::Call>(parameters, [](const Program::Call& call, uint8_t* smem) {
    gm::dense::product<__nv_bfloat16, S>(*call.p, *call.first, *call.second, smem);
  });
}

#define GM_ROW(mt, blocks, groups, slices, cluster, ctas, ...)        \
  {GM_TEXT(GM_NAME(mt##x##blocks##x##groups##x##slices##x##cluster)), \
   kernel<GM_SHAPE(mt, blocks, groups, slices, cluster, ctas, __VA_ARGS__)>},
constexpr Program kPrograms[] = {GM_SHAPES(GM_ROW)};

}  // namespace

int gm::CudaKernel::launch(int, void*, const Launch& shape, void** arguments) {
  return launch_program(kPrograms, name, shape, static_cast<const dense::Params*>(arguments[0]), arguments[1],
                        arguments[2]);
}
