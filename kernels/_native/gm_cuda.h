// Shared header of the ahead-of-time CUDA kernels:
// kernels/<family>/_<op>_sm90.cu -> _lib/libgristmill_cuda_sm90a.so.
//
// One .cu file is read twice. nvcc compiles the part under __CUDACC__ to a cubin for sm_90a;
// the host compiler compiles the rest and the cubin is embedded beside it.
// So the library needs no CUDA runtime: it loads on a machine without a GPU,
// and finds the driver (libcuda.so.1) when first called. Nothing else is linked.
//
//   #include "gm_cuda.h"
//   struct Params {  // seen by both sides
//     const float* x;
//     float* y;
//     int n;
//   };
//   #ifdef __CUDACC__
//   extern "C" __global__ void my_kernel(const __grid_constant__ Params p) {  // extern "C": found by name
//     const int i = blockIdx.x * blockDim.x + threadIdx.x;
//     if (i < p.n) p.y[i] = 2 * p.x[i];
//   }
//   #else
//   #include "calls/my_op.h"  // the struct of its calls, which `make generate` writes
//   static gm::CudaKernel my_kernel{GM_CUBIN, "my_kernel"};
//   GM_CUDA_CALL(gm_my_op, MyOp)  // int gm_my_op(...)
//   (const GmMyOpCall& call, const gm_my_op_options&, int device, void* stream) {
//     if (call.n < 1 || call.n > INT32_MAX) return call.n == 0 ? GM_OK : GM_E_SHAPE;
//     Params p{static_cast<const float*>(call.x), static_cast<float*>(call.y), int(call.n)};
//     void* args[] = {&p};
//     return my_kernel.launch(device, stream, {.grid_x = unsigned(p.n + 255) / 256, .block = 256}, args);
//   }
//   #endif
//
// launch() also takes .smem (bytes of dynamic shared memory), .cluster (CTAs of a cluster) and .pdl.
//
// In Python: CallEntry("gm_my_op", "my_op").cuda(config, call, device) (kernels/native_call.py). The launch is
// asynchronous on `stream`, may be captured into a CUDA graph once the kernel has been launched or prepared on the
// device, and returns 0, GM_E_DRIVER, or -1000 - CUresult.
//
// Driver: CUDA 12.0 or newer (r525), for cuLibraryLoadData;
// and it must accept the cubin of the toolkit that built it.
#pragma once

#ifndef __CUDACC__
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>

#include <cstdint>

#define GM_CUDA_ENTRY(name) extern "C" __attribute__((visibility("default"))) int name
// GM_CUDA_CALL(gm_my_op, MyOp, tile, parts)(const GmMyOpCall& call, const gm_my_op_options& options, int device, void* stream): an
// entry that takes the struct of "calls/my_op.h", and options of these names, int64_t, out of the configuration. The digest of the struct
// is compared with that of the declaration when the entry is first looked up (kernels/native_call.py).
#define GM_CUDA_CALL(name, Op, ...)                                                                          \
  struct name##_options {                                                                                    \
    __VA_OPT__(int64_t __VA_ARGS__;)                                                                         \
  };                                                                                                         \
  extern "C" __attribute__((visibility("default"))) uint64_t call_of_##name() {                              \
    return Gm##Op##Call::kDigest;                                                                            \
  }                                                                                                          \
  extern "C" __attribute__((visibility("default"))) const char* options_of_##name() { return #__VA_ARGS__; } \
  GM_CUDA_ENTRY(name)
// GM_CUDA_ARGS(gm_my_op, GmMyArgs)(const GmMyArgs* args): an entry that takes the struct of an args.h, which
// `make generate` writes from args.py (quant/argument_struct.py); checked like that of a call.
#define GM_ARGS_OF(name) args_of_##name
#define GM_CUDA_ARGS(name, Struct)                                                                          \
  extern "C" __attribute__((visibility("default"))) uint64_t GM_ARGS_OF(name)() { return Struct::kDigest; } \
  GM_CUDA_ENTRY(name)
enum : int {
  GM_OK = 0,
  GM_E_DTYPE = -1,
  GM_E_SHAPE = -2,
  GM_E_ARG = -5,
  GM_E_DRIVER = -6,
  GM_E_CUDA = -1000
};

// The cubin made of this very source; GM_CUBIN_SYMBOL comes from CMake.
extern "C" const unsigned char GM_CUBIN_SYMBOL[];
#define GM_CUBIN GM_CUBIN_SYMBOL

namespace gm {

// Entry points of the driver, looked up once. All null if there is no driver.
struct CudaDriver {
  decltype(&cuCtxGetCurrent) ctx_get_current = nullptr;
  decltype(&cuCtxGetDevice) ctx_get_device = nullptr;
  decltype(&cuCtxPushCurrent) ctx_push = nullptr;
  decltype(&cuCtxPopCurrent) ctx_pop = nullptr;
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) primary_retain = nullptr;
  decltype(&cuLibraryLoadData) library_load = nullptr;
  decltype(&cuLibraryGetKernel) library_kernel = nullptr;
  decltype(&cuKernelSetAttribute) kernel_attribute = nullptr;
  decltype(&cuLaunchKernelEx) launch = nullptr;
  decltype(&cuTensorMapEncodeTiled) tensor_map = nullptr;
  bool ready = false;
};

extern CudaDriver g_driver;       // cuda_driver.cpp
extern pthread_mutex_t g_mutex;   // guards first uses
const CudaDriver* cuda_driver();  // null if there is no usable driver

// Describes a tensor to TMA (cuTensorMapEncodeTiled). sizes, box: elements along each dimension, innermost
// first; strides: bytes from one index to the next, of all dimensions but the innermost, multiples of 16.
// Boxes are of 128 bytes along the innermost dimension, and land in shared memory in the 128-byte swizzle,
// with zeros past the tensor. fetch: what the L2 cache fetches at a time. With 256 bytes it fetches ahead, which
// helps what waits for single boxes or reads them again; what streams through memory once is read at 4.1 TB/s with
// 256 bytes and at 4.4 with 128 on an H200. GM_OK, GM_E_DRIVER or a CUDA error.
int tensor_map(CUtensorMap* map, CUtensorMapDataType type, unsigned rank, const void* base,
               const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
               CUtensorMapL2promotion fetch = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

// Of a matrix [rows, k], rows ld bytes apart.
inline int rows_map(CUtensorMap* map, CUtensorMapDataType type, const void* base, uint64_t k, uint64_t rows,
                    uint64_t ld, unsigned box_k, unsigned box_rows,
                    CUtensorMapL2promotion fetch = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  const cuuint64_t sizes[] = {k, rows}, strides[] = {ld};
  const cuuint32_t box[] = {box_k, box_rows};
  return tensor_map(map, type, 2, base, sizes, strides, box, fetch);
}

inline CUtensorMapDataType float16_type(bool bf16) {
  return bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// As copies of 16 bytes and TMA need it.
inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

struct Launch {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1;
  unsigned block = 128;
  unsigned smem = 0;     // dynamic shared memory, bytes
  unsigned cluster = 1;  // CTAs of a cluster, along x
  // Programmatic dependent launch: may start before the previous kernel on the stream has ended.
  bool pdl = false;
};

// A kernel of an embedded cubin. Static storage, constant initialisation, thread-safe.
class CudaKernel {
 public:
  constexpr CudaKernel(const unsigned char* cubin, const char* name) : cubin_(cubin), name_(name) {}

  // Loads the cubin and allows `smem` bytes on `device` without launching: call it before graph capture.
  int prepare(int device, unsigned smem);
  // `device` is the ordinal of the tensors; `stream` a CUstream of it.
  int launch(int device, void* stream, const Launch& shape, void** args);

 private:
  const unsigned char* cubin_;
  const char* name_;
  CUkernel kernel_ = nullptr;
  unsigned smem_[64] = {};  // bytes allowed so far, by device
};

}  // namespace gm
#endif
