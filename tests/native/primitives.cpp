// The primitives of gm_cpu.h, exposed to tests/native/test_primitives.py.
// Compiled by the test, once per level.
#include "gm_cpu.h"

GM_KERNEL(t_exp)(const float* x, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + gm::kLanes <= n; i += gm::kLanes) gm::store(out + i, gm::exp(gm::load(x + i)));
  if (i < n) gm::store(out + i, gm::exp(gm::load(x + i, n - i)), n - i);
  return GM_OK;
}

namespace {

template <class T>
int narrow(const float* x, T* vector, T* scalar, int64_t n) {
  for (int64_t i = 0; i < n; i += gm::kLanes) gm::store(vector + i, gm::load(x + i));
  for (int64_t i = 0; i < n; ++i) scalar[i] = gm::from_float<T>(x[i]);
  return GM_OK;
}

template <class T>
int widen(const T* x, float* vector, float* scalar, int64_t n) {
  for (int64_t i = 0; i < n; i += gm::kLanes) gm::store(vector + i, gm::load(x + i));
  for (int64_t i = 0; i < n; ++i) scalar[i] = gm::to_float(x[i]);
  return GM_OK;
}

}  // namespace

// Vector and scalar conversions side by side; n a multiple of 16.
GM_KERNEL(t_narrow)(const float* x, void* vector, void* scalar, int64_t n, int dtype){
    GM_DISPATCH_FLOAT(dtype, T, { return narrow(x, static_cast<T*>(vector), static_cast<T*>(scalar), n); })}

GM_KERNEL(t_widen)(const void* x, float* vector, float* scalar, int64_t n, int dtype){
    GM_DISPATCH_FLOAT(dtype, T, { return widen(static_cast<const T*>(x), vector, scalar, n); })}

// out[0] = sum, out[1] = max, of the first gm::kLanes values; returns the number of lanes.
GM_KERNEL(t_reduce)(const float* x, float* out) {
  out[0] = gm::sum(gm::load(x));
  out[1] = gm::max(gm::load(x));
  return gm::kLanes;
}
