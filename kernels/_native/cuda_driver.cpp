// The CUDA driver, loaded by dlopen at the first call,
// so that this library also loads on machines without one.
#include "gm_cuda.h"

namespace gm {

CudaDriver g_driver;
pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;

namespace {

pthread_once_t g_once = PTHREAD_ONCE_INIT;

template <class F>
bool find(void* library, const char* name, F& out) {
  out = reinterpret_cast<F>(dlsym(library, name));
  return out != nullptr;
}

void open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return;
  CudaDriver& d = g_driver;
  // The _v2 names are the ABI that cuda.h's plain names stand for.
  d.ready =
      find(library, "cuCtxGetCurrent", d.ctx_get_current) &&
      find(library, "cuCtxGetDevice", d.ctx_get_device) && find(library, "cuCtxPushCurrent_v2", d.ctx_push) &&
      find(library, "cuCtxPopCurrent_v2", d.ctx_pop) && find(library, "cuDeviceGet", d.device_get) &&
      find(library, "cuDevicePrimaryCtxRetain", d.primary_retain) &&
      find(library, "cuLibraryLoadData", d.library_load) &&
      find(library, "cuLibraryGetKernel", d.library_kernel) &&
      find(library, "cuKernelSetAttribute", d.kernel_attribute) &&
      find(library, "cuLaunchKernelEx", d.launch) && find(library, "cuTensorMapEncodeTiled", d.tensor_map);
}

int failed(CUresult result) { return GM_E_CUDA - int(result); }

// Makes the device's primary context current (torch's own) and restores the previous one. torch binds
// a thread lazily, so a fresh thread may have none, and a caller may use another device.
class Current {
 public:
  Current(const CudaDriver* driver, int device) : driver_(driver) {
    CUcontext context = nullptr;
    CUdevice current_device = -1;
    driver->ctx_get_current(&context);
    if (context != nullptr && driver->ctx_get_device(&current_device) == CUDA_SUCCESS &&
        current_device == device)
      return;
    CUdevice handle;
    if ((status_ = driver->device_get(&handle, device)) != CUDA_SUCCESS) return;
    if ((status_ = driver->primary_retain(&context, handle)) != CUDA_SUCCESS) return;
    status_ = driver->ctx_push(context);
    pushed_ = status_ == CUDA_SUCCESS;
  }
  ~Current() {
    CUcontext context;
    if (pushed_) driver_->ctx_pop(&context);
  }
  CUresult status() const { return status_; }

 private:
  const CudaDriver* driver_;
  CUresult status_ = CUDA_SUCCESS;
  bool pushed_ = false;
};

// The library of a cubin, loaded once for all of its kernels. The caller holds g_mutex.
CUresult library_of(const CudaDriver* driver, const void* cubin, CUlibrary* library) {
  static struct {
    const void* cubin;
    CUlibrary library;
  } loaded[256];
  static int count = 0;
  for (int i = 0; i < count; ++i)
    if (loaded[i].cubin == cubin) {
      *library = loaded[i].library;
      return CUDA_SUCCESS;
    }
  const CUresult result = driver->library_load(library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS && count < int(sizeof loaded / sizeof *loaded))
    loaded[count++] = {cubin, *library};
  return result;
}

}  // namespace

const CudaDriver* cuda_driver() {
  pthread_once(&g_once, open_driver);
  return g_driver.ready ? &g_driver : nullptr;
}

int tensor_map(CUtensorMap* map, CUtensorMapDataType type, unsigned rank, const void* base,
               const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
               CUtensorMapL2promotion fetch) {
  const CudaDriver* driver = cuda_driver();
  if (driver == nullptr) return GM_E_DRIVER;
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const CUresult result = driver->tensor_map(map, type, rank, const_cast<void*>(base), sizes, strides, box,
                                             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                             fetch, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? GM_OK : failed(result);
}

int CudaKernel::prepare(int device, unsigned smem) {
  if (device < 0 || device >= int(sizeof smem_ / sizeof *smem_)) return GM_E_ARG;
  const CudaDriver* driver = cuda_driver();
  if (driver == nullptr) return GM_E_DRIVER;
  if (__atomic_load_n(&kernel_, __ATOMIC_ACQUIRE) != nullptr &&
      __atomic_load_n(&smem_[device], __ATOMIC_ACQUIRE) >= smem)
    return GM_OK;
  Current current(driver, device);
  if (current.status() != CUDA_SUCCESS) return failed(current.status());
  pthread_mutex_lock(&g_mutex);
  CUresult result = CUDA_SUCCESS;
  CUkernel kernel = kernel_;
  if (kernel == nullptr) {
    CUlibrary library;
    result = library_of(driver, cubin_, &library);
    if (result == CUDA_SUCCESS) result = driver->library_kernel(&kernel, library, name_);
  }
  // 48 KB, the kernel's static part included, need no attribute.
  if (result == CUDA_SUCCESS && smem > 16 * 1024) {
    CUdevice handle;
    result = driver->device_get(&handle, device);
    if (result == CUDA_SUCCESS)
      result = driver->kernel_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, int(smem), kernel,
                                        handle);
  }
  if (result == CUDA_SUCCESS) {
    if (smem_[device] < smem) __atomic_store_n(&smem_[device], smem, __ATOMIC_RELEASE);
    __atomic_store_n(&kernel_, kernel, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&g_mutex);
  return result == CUDA_SUCCESS ? GM_OK : failed(result);
}

int CudaKernel::launch(int device, void* stream, const Launch& shape, void** args) {
  const int status = prepare(device, shape.smem);
  if (status != GM_OK) return status;
  const CudaDriver* driver = &g_driver;
  Current current(driver, device);
  if (current.status() != CUDA_SUCCESS) return failed(current.status());
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count].value.clusterDim.x = shape.cluster;
    attributes[count].value.clusterDim.y = attributes[count].value.clusterDim.z = 1;
    ++count;
  }
  if (shape.pdl) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count].value.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  CUlaunchConfig config = {};
  config.gridDimX = shape.grid_x, config.gridDimY = shape.grid_y, config.gridDimZ = shape.grid_z;
  config.blockDimX = shape.block, config.blockDimY = 1, config.blockDimZ = 1;
  config.sharedMemBytes = shape.smem;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  const CUresult result = driver->launch(&config, reinterpret_cast<CUfunction>(kernel_), args, nullptr);
  return result == CUDA_SUCCESS ? GM_OK : failed(result);
}

}  // namespace gm

// 0 if the driver was found, else GM_E_DRIVER; for checks in Python before planning.
GM_CUDA_ENTRY(gm_cuda_probe)() { return gm::cuda_driver() != nullptr ? GM_OK : GM_E_DRIVER; }
