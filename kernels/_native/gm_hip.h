// Shared header of the HIP kernels for AMD GPUs: kernels/**/_<name>.hip -> _lib/libgristmill_hip.so.
//
// One .hip file is read twice, as the .cu files are. clang compiles the part under GM_HIP_DEVICE to a code
// object per target, without ROCm (gm_hip_device.h); the host compiler compiles the part under GM_HIP_HOST,
// and the code objects are embedded beside it. The library needs no HIP runtime: it loads on every machine,
// and finds libamdhip64.so when first called.
//
//   #include "gm_hip.h"
//   struct Params {  // seen by both sides
//     const float* x;
//     float* y;
//     int n;
//   };
//   #if GM_HIP_DEVICE
//   GM_KERNEL_OF(256) my_kernel(Params p) {
//     const int i = gm::block_x() * 256 + gm::thread();
//     if (i < p.n) p.y[i] = 2 * p.x[i];
//   }
//   #endif
//   #if GM_HIP_HOST
//   #include "args.h"  // GmMyOpArgs, which `make generate` writes from args.py
//   static gm::HipKernel my_kernel_of_host = GM_HIP_KERNEL(my_kernel);
//   GM_HIP_ARGS(gm_my_op, GmMyOpArgs)(const GmMyOpArgs* args) {
//     if (args->n < 1) return args->n < 0 ? GM_E_SHAPE : GM_OK;
//     Params p{args->x, args->y, args->n};
//     void* arguments[] = {&p};
//     const gm::HipLaunch shape{.grid_x = unsigned(p.n + 255) / 256, .block = 256};
//     return my_kernel_of_host.launch(args->device, args->arch, args->stream, shape, arguments);
//   }
//   #endif
//
// tests/native compiles both parts into one program,
// whose launch() executes the kernel on the CPU (GM_HIP_FIBERS).
#pragma once

#if defined(GM_HIP_FIBERS)
#define GM_HIP_DEVICE 1
#define GM_HIP_HOST 1
#elif defined(__HIP__)
#define GM_HIP_DEVICE 1
#define GM_HIP_HOST 0
#else
#define GM_HIP_DEVICE 0
#define GM_HIP_HOST 1
#endif

#if GM_HIP_HOST
#include <cstddef>
#include <cstdint>

#define GM_HIP_ENTRY(name) extern "C" __attribute__((visibility("default"))) int name
// GM_HIP_ARGS(gm_my_op, GmMyArgs)(const GmMyArgs* args): an entry that takes the struct of an args.h, which `make
// generate` writes from args.py; its digest is compared when the entry is first looked up (quant/argument_struct.py).
#define GM_HIP_ARGS(name, Struct)                                                                         \
  extern "C" __attribute__((visibility("default"))) uint64_t args_of_##name() { return Struct::kDigest; } \
  GM_HIP_ENTRY(name)
enum : int {
  GM_OK = 0,
  GM_E_DTYPE = -1,
  GM_E_SHAPE = -2,
  GM_E_ARG = -5,
  GM_E_DRIVER = -6,
  GM_E_NO_CODE = -8,  // no code object for the device's architecture
  GM_E_HIP = -1000    // minus a hipError_t
};

namespace gm {

struct HipLaunch {
  unsigned grid_x = 1, grid_y = 1;
  unsigned block = 256;
  unsigned lds = 0;  // bytes of gm_shared
};

// A code object of one architecture, of the table that CMake writes per source; ends with a null arch.
struct HipImage {
  const char* arch;
  const unsigned char* bytes;
};

}  // namespace gm

#if !defined(GM_HIP_FIBERS)
extern "C" const gm::HipImage GM_HIP_IMAGES[];  // the name comes from CMake
#define GM_HIP_KERNEL(name) {GM_HIP_IMAGES, #name}

namespace gm {

// A kernel of the embedded code objects. Static storage, constant initialisation, thread-safe.
class HipKernel {
 public:
  constexpr HipKernel(const HipImage* images, const char* name) : images_(images), name_(name) {}

  // `device` is the ordinal of the tensors, `arch` its architecture (gfx1100), `stream` a hipStream_t of it.
  // The first launch on a device loads the code object; later ones may be captured into a graph.
  int launch(int device, const char* arch, void* stream, const HipLaunch& shape, void** arguments);

 private:
  const HipImage* images_;
  const char* name_;
  void* functions_[64] = {};  // by device
};

}  // namespace gm
#endif
#endif

#if GM_HIP_DEVICE
#include "gm_hip_device.h"
#endif
