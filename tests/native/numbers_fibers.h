// Conversions and sums of CUDA on a CPU, beside those of attention_fibers.h.
#pragma once
#include "attention_fibers.h"

inline float __half2float(__half v) { return gm::Num<__half>::to_float(v); }
inline float __bfloat162float(__nv_bfloat16 v) { return gm::Num<__nv_bfloat16>::to_float(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.f / v; }
inline int __float2int_rn(float v) { return int(std::nearbyint(v)); }
inline __half2 __floats2half2_rn(float x, float y) {
  return {gm::Num<__half>::round(x), gm::Num<__half>::round(y)};
}
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {gm::Num<__nv_bfloat16>::round(x), gm::Num<__nv_bfloat16>::round(y)};
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
