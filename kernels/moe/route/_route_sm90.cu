// Route in one launch: a cluster of at most eight CTAs for up to 64 tokens (_order.cuh).
#include "gm_cuda.h"
#ifdef __CUDACC__
#include "_cluster_sm90.cuh"
// It uses that.
#include "_order.cuh"

#define GM_ROUTE(name, type, each)                                         \
  extern "C" __global__ void __launch_bounds__(gm::route::kThreads, 1)     \
      route_##name##_##each(const __grid_constant__ gm::route::Params p) { \
    extern __shared__ __align__(16) char memory[];                         \
    gm::route::run<type, each>(p, memory);                                 \
  }
GM_TOPK_KERNELS(GM_ROUTE)

#else
#include "_params.h"
#include "calls/route.h"

#define GM_ROUTE(name, type, each) {GM_CUBIN, "route_" #name "_" #each},
static gm::CudaKernel g_routes[] = {GM_TOPK_KERNELS(GM_ROUTE)};

GM_CUDA_CALL(gm_route_sm90, Route)
(const GmRouteCall& call, const gm_route_sm90_options&, int device, void* stream) {
  using namespace gm;
  if (call.x_type < 0 || call.x_type > 2) return GM_E_DTYPE;
  if (!topk::is_choice(call) || call.top_k > route::kMaxTopK || call.m < 0 || call.m > route::kTokens)
    return GM_E_SHAPE;
  if (call.local < 1 || call.first < 0 || call.first + call.local > call.e) return GM_E_SHAPE;
  route::Params p = route::params_of(call, call.x_type == 0 ? 4 : 2);
  void* args[] = {&p};
  const int size = topk::size_of(call.e), ctas = route::ctas_of(call.m);
  return g_routes[call.x_type * std::size(topk::kSizes) + size].launch(
      device, stream,
      {.grid_x = unsigned(ctas),
       .block = route::kThreads,
       .smem = unsigned(route::bytes_of(p, ctas, topk::kSizes[size])),
       .cluster = unsigned(ctas),
       .pdl = true},
      args);
}
#endif
