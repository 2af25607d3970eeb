// kernels/sampling/_sample_sm90.cuh on a CPU, for test_sample_fibers.py.
#include "cluster_fibers.h"

#include "../../kernels/sampling/_sample_sm90.cuh"

namespace {

template <typename T, bool kCached>
void kernel(void* parameters) {
  gm::Row<T, kCached>(*static_cast<SampleParams*>(parameters), gm::shared()).run();
}

}  // namespace

// 0, or 1 if threads wait for each other in vain.
extern "C" int sample_fibers(const void* logits, int64_t stride, const float* temperature,
                             const int32_t* top_k, const float* top_p, const float* min_p,
                             const int64_t* seed, const int64_t* index, int64_t* ids, int64_t rows, int64_t v,
                             int bf16, int ranks, int threads, int keep, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  const int slice = int((v + 4 * ranks - 1) / (4 * ranks)) * 4;
  int bits = 0;
  while (v >> bits) ++bits;
  const int exponent = std::min(62 - bits, gm::kMaxExponent);
  SampleParams p{logits, stride, temperature, top_k, top_p, min_p, seed, index, ids, int(v), slice, exponent};
  const auto body = keep ? (bf16 ? kernel<uint16_t, true> : kernel<float, true>)
                         : (bf16 ? kernel<uint16_t, false> : kernel<float, false>);
  return !gm::fibers::launch(body, &p, rows, ranks, threads, sizeof(gm::Shared) + (keep ? 4 * slice : 0));
}
