// Paged attention for few rows of each sequence on Hopper with a soft cap of the scores: the kernels, and
// their entry point, which is called by that of _paged_decode_sm90.cu.
#include "_paged_decode_instances_sm90.cuh"

#ifdef __CUDACC__

#define GM_ONE(type, code, C, d, n, suffix)                                                     \
  extern "C" __global__ void __launch_bounds__(gm::DecodeShape<d, n, C::kBytes>::kThreads,      \
                                               gm::DecodeShape<d, n, C::kBytes>::kResident)     \
      paged_decode_##type##_d##d##suffix##_cap(const __grid_constant__ gm::DecodeParams p,      \
                                               const __grid_constant__ gm::SoftCap<true> cap) { \
    gm::paged_decode<C, d, n, true>(p, cap);                                                    \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype, head_dim, rows;
  gm::CudaKernel kernel;
};

#define GM_ONE(type, code, C, d, n, suffix) \
  {code, d, n, {GM_CUBIN, "paged_decode_" #type "_d" #d #suffix "_cap"}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

}  // namespace

GM_CUDA_ENTRY(gm_paged_decode_softcap_sm90)
(const gm::DecodeParams* p, const gm::SoftCap<true>* cap, int dtype, int head_dim, int rows,
 const gm::Launch* shape, int device, void* stream) {
  void* args[] = {const_cast<gm::DecodeParams*>(p), const_cast<gm::SoftCap<true>*>(cap)};
  for (Instance& i : g_instances)
    if (i.dtype == dtype && i.head_dim == head_dim && i.rows == rows)
      return i.kernel.launch(device, stream, *shape, args);
  return GM_E_SHAPE;
}

#endif
