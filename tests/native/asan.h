// For the sanitizer programs. A Buffer is a heap block of exactly the bytes asked for, so that
// AddressSanitizer traps the first byte on either side; rows of a matrix are separated by poisoned padding
// when the stride is wider than the row.
//
//   GM_LEVELS(gm_my_op, (const float*, int64_t))            declares gm_my_op__base ... and the table
//   gm_my_op_levels[] for (auto& level : gm_my_op_levels) if (runs_here(level.name)) level.call(...);
#pragma once
#include <sanitizer/asan_interface.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

template <class T>
class Buffer {
 public:
  Buffer(int64_t rows, int64_t cols, int64_t stride) : rows_(rows), cols_(cols), stride_(stride) {
    const int64_t count = rows > 0 ? (rows - 1) * stride + cols : 0;
    data_ = static_cast<T*>(std::malloc(count * sizeof(T) + (count == 0)));
    std::memset(data_, 0, count * sizeof(T));
    for (int64_t r = 0; r + 1 < rows; ++r)
      __asan_poison_memory_region(data_ + r * stride + cols, (stride - cols) * sizeof(T));
  }
  explicit Buffer(int64_t count) : Buffer(1, count, count) {}
  ~Buffer() {
    const int64_t count = rows_ > 0 ? (rows_ - 1) * stride_ + cols_ : 0;
    __asan_unpoison_memory_region(data_, count * sizeof(T));
    std::free(data_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() { return data_; }
  T& operator()(int64_t r, int64_t c) { return data_[r * stride_ + c]; }

 private:
  int64_t rows_, cols_, stride_;
  T* data_;
};

// Whether this processor runs an entry, gm_<op>__<level>. Says so on standard output: ci/sanitize.sh compares
// with what was built.
inline bool can_run(const char* level) {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni"),
             bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (!std::strcmp(level, "base")) return __builtin_cpu_supports("sse4.2");
  if (!std::strcmp(level, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!std::strcmp(level, "avx512")) return avx512;
  if (!std::strcmp(level, "avx512_vnni")) return vnni;
  if (!std::strcmp(level, "avx512_bf16")) return bf16;
  return false;
#else
#if defined(__aarch64__)
  const bool i8mm = getauxval(AT_HWCAP2) & 1 << 13;
  if (!std::strcmp(level, "neon_dotprod")) return getauxval(AT_HWCAP) & 1 << 20;
  if (!std::strcmp(level, "neon_i8mm")) return i8mm;
  if (!std::strcmp(level, "sve")) return i8mm && getauxval(AT_HWCAP) & 1 << 22;
#endif
  return !std::strcmp(level, "base") || !std::strcmp(level, "neon");
#endif
}
inline bool runs_here(const char* entry) {
  const bool runs = can_run(std::strstr(entry, "__") + 2);
  std::printf("%s %s\n", runs ? "runs" : "cannot run", entry);
  return runs;
}

// Levels are weak: one that was not built is null.
#define GM_DECLARE(op, isa, args) extern "C" __attribute__((weak)) int op##__##isa args;
#define GM_EVERY_LEVEL(use, op, args)                                                                     \
  use(op, base, args) use(op, avx2, args) use(op, avx512, args) use(op, avx512_vnni, args)                \
      use(op, avx512_bf16, args) use(op, neon, args) use(op, neon_dotprod, args) use(op, neon_i8mm, args) \
          use(op, sve, args)
#define GM_ENTRY(op, isa, args) {#op "__" #isa, op##__##isa},
#define GM_LEVELS(op, args)            \
  GM_EVERY_LEVEL(GM_DECLARE, op, args) \
  static const struct {                \
    const char* name;                  \
    int(*call) args;                   \
  } op##_levels[] = {GM_EVERY_LEVEL(GM_ENTRY, op, args)}

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)
