// kernels/moe/grouped_topk/_rows.cuh on a CPU, for test_grouped_topk_fibers.py; faults are those of grouped_topk_fibers.h.
#include "grouped_topk_fibers.h"

#include "calls/grouped_topk.h"
#include "moe/grouped_topk/_rows.cuh"

namespace {

template <typename T, int kEach>
void kernel(void* parameters) {
  using namespace gm;
  const auto& p = *static_cast<const topk::Params*>(parameters);
  auto* scratch = static_cast<topk::Scratch<kEach>*>(shared()) + warp();
  const int64_t row = first_row(threads() / 32) + warp();
  if (row < p.rows) {
    topk::Row<T, kEach> one(p, *scratch, row);
    one.run(), one.write();
  }
}

template <typename T>
bool run(const GmGroupedTopkCall& call, int warps) {
  using namespace gm::topk;
  Params p = params_of(call, sizeof(T));
  const int64_t blocks = (call.m + warps - 1) / warps;
  const auto launch = [&](auto body, size_t bytes) {
    return gm::fibers::launch(body, &p, blocks, 1, 32 * warps, warps * bytes);
  };
  switch (kSizes[size_of(call.e)]) {
    case 4:
      return launch(kernel<T, 4>, sizeof(Scratch<4>));
    case 8:
      return launch(kernel<T, 8>, sizeof(Scratch<8>));
    case 12:
      return launch(kernel<T, 12>, sizeof(Scratch<12>));
    case 16:
      return launch(kernel<T, 16>, sizeof(Scratch<16>));
    default:
      return launch(kernel<T, 32>, sizeof(Scratch<32>));
  }
}

}  // namespace

// 0, or 1 if lanes wait for each other in vain.
extern "C" int grouped_topk_fibers(const GmGroupedTopkCall* call, int warps, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  return !(call->x_type == 0   ? run<float>(*call, warps)
           : call->x_type == 1 ? run<gm::Half>(*call, warps)
                               : run<gm::Bfloat16>(*call, warps));
}
