// The HIP runtime, loaded by dlopen at the first call, so that this library also loads on machines without
// one. Its functions are declared here: no header of ROCm is needed. They are the same from ROCm 5 to 7.
#include <dlfcn.h>
#include <pthread.h>

#include <cstring>

#define GM_HIP_IMAGES gm_no_images
#include "gm_hip.h"

namespace gm {
namespace {

struct Runtime {
  int (*get_device)(int*) = nullptr;
  int (*set_device)(int) = nullptr;
  int (*module_load)(void**, const void*) = nullptr;
  int (*module_function)(void**, void*, const char*) = nullptr;
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                void**) = nullptr;
  bool ready = false;
};

Runtime g_runtime;
pthread_once_t g_once = PTHREAD_ONCE_INIT;
pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;

template <class F>
bool find(void* library, const char* name, F& out) {
  out = reinterpret_cast<F>(dlsym(library, name));
  return out != nullptr;
}

void open_runtime() {
  // torch has loaded one of these already; another copy would not know its streams, so its own comes first.
  const char* names[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};
  void* library = nullptr;
  const int ways[] = {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL};
  for (int flags : ways)
    for (const char* name : names)
      if (library == nullptr) library = dlopen(name, flags);
  if (library == nullptr) return;
  Runtime& r = g_runtime;
  r.ready = find(library, "hipGetDevice", r.get_device) && find(library, "hipSetDevice", r.set_device) &&
            find(library, "hipModuleLoadData", r.module_load) &&
            find(library, "hipModuleGetFunction", r.module_function) &&
            find(library, "hipModuleLaunchKernel", r.launch);
}

const Runtime* runtime() {
  pthread_once(&g_once, open_runtime);
  return g_runtime.ready ? &g_runtime : nullptr;
}

int failed(int error) { return GM_E_HIP - error; }

// Makes a device current, and restores the previous one.
class Current {
 public:
  Current(const Runtime* r, int device) : runtime_(r) {
    status_ = r->get_device(&previous_);
    if (status_ == 0 && previous_ != device) status_ = r->set_device(device), changed_ = status_ == 0;
  }
  ~Current() {
    if (changed_) runtime_->set_device(previous_);
  }
  int status() const { return status_; }

 private:
  const Runtime* runtime_;
  int previous_ = -1, status_ = 0;
  bool changed_ = false;
};

// The module of a code object on the current device,
// loaded once for all of its kernels. The caller holds g_mutex.
int module_of(const Runtime* r, const unsigned char* bytes, int device, void** module) {
  static struct {
    const unsigned char* bytes;
    int device;
    void* module;
  } loaded[256];
  static int count = 0;
  for (int i = 0; i < count; ++i)
    if (loaded[i].bytes == bytes && loaded[i].device == device) {
      *module = loaded[i].module;
      return 0;
    }
  const int error = r->module_load(module, bytes);
  if (error == 0 && count < int(sizeof loaded / sizeof *loaded)) loaded[count++] = {bytes, device, *module};
  return error;
}

}  // namespace

int HipKernel::launch(int device, const char* arch, void* stream, const HipLaunch& shape, void** arguments) {
  if (device < 0 || device >= int(sizeof functions_ / sizeof *functions_) || arch == nullptr) return GM_E_ARG;
  const HipImage* image = images_;
  while (image->arch != nullptr && std::strcmp(image->arch, arch) != 0) ++image;
  if (image->arch == nullptr) return GM_E_NO_CODE;
  const Runtime* r = runtime();
  if (r == nullptr) return GM_E_DRIVER;
  Current current(r, device);
  if (current.status() != 0) return failed(current.status());
  void* function = __atomic_load_n(&functions_[device], __ATOMIC_ACQUIRE);
  if (function == nullptr) {
    pthread_mutex_lock(&g_mutex);
    void* module = nullptr;
    int error = module_of(r, image->bytes, device, &module);
    if (error == 0) error = r->module_function(&function, module, name_);
    if (error == 0) __atomic_store_n(&functions_[device], function, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&g_mutex);
    if (error != 0) return failed(error);
  }
  const int error = r->launch(function, shape.grid_x, shape.grid_y, 1, shape.block, 1, 1, shape.lds, stream,
                              arguments, nullptr);
  return error == 0 ? GM_OK : failed(error);
}

}  // namespace gm
