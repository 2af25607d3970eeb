// kernels/moe/route/_order.cuh on a CPU, for test_route_fibers.py: clusters of fibers (cluster_fibers.h).
//
// `fault` plants one fault: those of both headers, and 8 = a bit is set by a load and a store, 9 = bytes of other CTAs are not counted,
// 10 = nobody waits for bytes. Shared memory then begins with zeros, so that places that are read too early are wrong, and not outside of
// every tensor.
#include "calls/route.h"
#include "grouped_topk_fibers.h"

namespace gm {

inline void begin() {}
inline uint32_t warp_sum(uint32_t v) {
  return of_warp(v, [](auto given) {
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += uint32_t(given(lane));
    return sum;
  });
}

// An mbarrier is the number of bytes that are to come.
inline void expect_bytes(uint64_t* barrier, int bytes) {
  // A CTA that is late, in some orders: others may have marked their tokens by then.
  if (fibers::order >= fibers::kSlowRanks && cluster_rank() == 1)
    for (int i = 0; i < 400; ++i) ++fibers::all[fibers::current].steps, fibers::yield();
  *barrier = uint64_t(bytes);
}
inline void wait_for_bytes(uint64_t* barrier) {
  while (fibers::fault != 10 && *barrier != 0) fibers::yield();
}
inline void set_bits(uint32_t* word, int rank, uint32_t bits, uint64_t* barrier) {
  uint32_t* const there = mapa(word, rank);
  const uint32_t before = *there;
  ++fibers::all[fibers::current].steps;
  if (fibers::fault == 8) fibers::yield();
  *there = fibers::fault == 8 ? before | bits : *there | bits;
  if (fibers::fault != 9 || rank == cluster_rank()) *mapa(barrier, rank) -= 4;
}

}  // namespace gm

#include "moe/route/_order.cuh"

namespace {

using namespace gm::route;

template <typename T, int kEach>
void kernel(void* parameters) {
  run<T, kEach>(*static_cast<const Params*>(parameters), gm::shared());
}

template <typename T>
bool launch(const GmRouteCall& call) {
  Params p = params_of(call, sizeof(T));
  const int ctas = ctas_of(call.m), each = gm::topk::kSizes[gm::topk::size_of(call.e)];
  const size_t bytes = bytes_of(p, ctas, each);
  const auto of_size = [&](auto body) { return gm::fibers::launch(body, &p, 1, ctas, kThreads, bytes); };
  switch (each) {
    case 4:
      return of_size(kernel<T, 4>);
    case 8:
      return of_size(kernel<T, 8>);
    case 12:
      return of_size(kernel<T, 12>);
    case 16:
      return of_size(kernel<T, 16>);
    default:
      return of_size(kernel<T, 32>);
  }
}

}  // namespace

// 0, or 1 if lanes wait for each other in vain.
extern "C" int route_fibers(const GmRouteCall* call, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault, gm::fibers::poison = fault ? 0 : char(0xA5);
  return !(call->x_type == 0   ? launch<float>(*call)
           : call->x_type == 1 ? launch<gm::Half>(*call)
                               : launch<gm::Bfloat16>(*call));
}
