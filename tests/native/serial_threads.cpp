// Stands for kernels/_native/threads.cpp in the sanitizer programs. It cuts the range into grains, first to
// last, so that a body that depends on seeing the whole range shows.
#include <cstdint>

extern "C" int gm_parallel_raw(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*),
                               void* context) {
  for (int64_t begin = 0; begin < n; begin += grain)
    body(begin, begin + grain < n ? begin + grain : n, context);
  return 0;
}

// A core that plans by the number of threads is told this many.
extern "C" {
int gm_pretended_threads = 1;
int gm_num_threads() { return gm_pretended_threads; }
}

// Nobody records (kernels/_native/call_list.h).
extern "C" void gm_note_call(int (*)(const void*, const void*), const void*, int64_t, const void*, int64_t) {}
