// Device side of the HIP kernels: what they use of the hardware, without any header of ROCm.
// tests/native/hip_fibers.h has the same functions for a CPU,
// so that CI executes the sources of the kernels as C++.
//
// Compiled with -DGM_LANES=32 (RDNA) or 64 (CDNA), the lanes of a wave.
#pragma once

#ifdef GM_HIP_FIBERS
#include "hip_fibers.h"
#else

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long int64_t;
typedef uint32_t u32x4 __attribute__((vector_size(16)));

#define GM_DEVICE __attribute__((device)) inline __attribute__((always_inline))
// A kernel of workgroups of `threads` lanes.
#define GM_KERNEL_OF(threads) \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads))) void

extern __attribute__((shared)) u32x4 gm_shared[];

namespace gm {

typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
typedef short s16x2 __attribute__((ext_vector_type(2)));
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));

GM_DEVICE int thread() { return int(__builtin_amdgcn_workitem_id_x()); }
GM_DEVICE int block_x() { return int(__builtin_amdgcn_workgroup_id_x()); }
GM_DEVICE int block_y() { return int(__builtin_amdgcn_workgroup_id_y()); }
GM_DEVICE u32x4* shared() { return gm_shared; }

// All lanes of the workgroup arrive, and see what others wrote to LDS before. The address space "local" saves
// the invalidation of the vector cache, which LDS does not need.
GM_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
// What this lane stored is visible to other workgroups that pass acquire() after they have seen a later
// atomic of this one.
GM_DEVICE void release() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }
GM_DEVICE void acquire() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
// Adds one to a counter of the device; the value before.
GM_DEVICE uint32_t count(uint32_t* at) {
  return __hip_atomic_fetch_add(at, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
GM_DEVICE void reset(uint32_t* at) { __hip_atomic_store(at, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }

GM_DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
GM_DEVICE uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
// The value of lane `lane() ^ mask` of the wave; every lane of the wave takes part.
GM_DEVICE float shuffle_xor(float value, int mask) {
  const int other = (thread() % GM_LANES ^ mask) * 4;
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(other, __builtin_bit_cast(int, value)));
}
// 16 bytes that are read once.
GM_DEVICE u32x4 load_once(const u32x4* at) { return __builtin_nontemporal_load(at); }
// The compiler moves nothing across: it would otherwise begin so many loads of LDS that it spills.
GM_DEVICE void in_order() {
  asm volatile("" ::: "memory");
  __builtin_amdgcn_sched_barrier(0);
}
GM_DEVICE float exponential(float x) { return __builtin_amdgcn_exp2f(x * 1.44269504088896341f); }
GM_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

struct Half {
  GM_DEVICE static float to_float(uint32_t bits) {
    return float(__builtin_bit_cast(_Float16, (uint16_t)bits));
  }
  GM_DEVICE static uint32_t from_float(float value) { return __builtin_bit_cast(uint16_t, (_Float16)value); }
  GM_DEVICE static float dot2(uint32_t a, uint32_t b, float sum) {
    return __builtin_amdgcn_fdot2(__builtin_bit_cast(f16x2, a), __builtin_bit_cast(f16x2, b), sum, false);
  }
  // Two differences.
  GM_DEVICE static uint32_t minus(uint32_t a, uint32_t b) {
    return __builtin_bit_cast(uint32_t, __builtin_bit_cast(f16x2, a) - __builtin_bit_cast(f16x2, b));
  }
};

struct Bf16 {
  GM_DEVICE static float to_float(uint32_t bits) { return bits_to_float(bits << 16); }
  GM_DEVICE static uint32_t from_float(float value) {
    const uint32_t bits = float_to_bits(value);
    if (value != value) return 0x7FC0u;
    return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  }
  GM_DEVICE static float dot2(uint32_t a, uint32_t b, float sum) {
#if GM_DOT2_BF16
    return __builtin_amdgcn_fdot2_f32_bf16(__builtin_bit_cast(bf16x2, a), __builtin_bit_cast(bf16x2, b), sum,
                                           false);
#else  // CDNA before gfx950
    sum = fused(bits_to_float(a << 16), bits_to_float(b << 16), sum);
    return fused(bits_to_float(a & 0xFFFF0000u), bits_to_float(b & 0xFFFF0000u), sum);
#endif
  }
};

}  // namespace gm
#endif
