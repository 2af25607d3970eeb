// y = 2 x: the smallest kernel that goes through the CUDA build, for tests of that build.
#include "gm_cuda.h"

struct Params {
  const float* x;
  float* y;
  int n;
};

#ifdef __CUDACC__
extern "C" __global__ void scale_kernel(const __grid_constant__ Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.y[i] = 2 * p.x[i];
}
#else
static gm::CudaKernel scale_kernel{GM_CUBIN, "scale_kernel"};

GM_CUDA_ENTRY(gm_test_scale)(const float* x, float* y, int n, int device, void* stream) {
  if (n < 0) return GM_E_SHAPE;
  if (n == 0) return GM_OK;
  Params p{x, y, n};
  void* args[] = {&p};
  return scale_kernel.launch(device, stream, {.grid_x = unsigned(n + 127) / 128, .block = 128}, args);
}
#endif
