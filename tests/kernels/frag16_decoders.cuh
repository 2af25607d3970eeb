// Kernels that decode tiles and do nothing else, from the macros of a source of linear/frag16_sm80: test_frag16_sm80_decoders.py puts them in the
// place of the source's entry header, and runs their PTX on the CPU.
//
// Thread 32 i + lane decodes its part of tile i of `in`. It writes the registers of 8 steps, and for the schedule decode the scales of rows g and
// g + 8 of each group, then their offsets if there are any. half: 16-bit scales are fp16, not bf16.
#pragma once
#include "linear/frag16_sm80/decoders.cuh"
#include "linear/frag16_sm80/decoders_gguf.cuh"
#include "linear/frag16_sm80/operands.cuh"
#include "linear/frag16_sm80/operands_gguf.cuh"

template <typename D>
__device__ __forceinline__ void decode(const uint8_t* in, uint32_t* out, int half) {
  const int thread = threadIdx.x;
  constexpr bool kOffsets = requires(const D& d) { d.offset(0, 0); };
  out += thread * (32 + (kOffsets ? 4 : 2) * D::kGroups);
  D decoder;
  decoder.load(in + (thread >> 5) * D::kBytes, thread & 31);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t a[4];
    decoder.pairs(step, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[4 * step + i] = a[i];
  }
  if constexpr (D::kGroups > 0) {
#pragma unroll
    for (int group = 0; group < D::kGroups; ++group) {
      const float2 scale = decoder.scale(group, half);
      out[32 + 2 * group] = __float_as_uint(scale.x), out[33 + 2 * group] = __float_as_uint(scale.y);
      if constexpr (kOffsets) {
        const float2 offset = decoder.offset(group, half);
        uint32_t* to = out + 32 + 2 * D::kGroups + 2 * group;
        to[0] = __float_as_uint(offset.x), to[1] = __float_as_uint(offset.y);
      }
    }
  }
}

template <typename D>
__device__ __forceinline__ void operand(uint32_t in, uint32_t* out, int half) {
  const int thread = threadIdx.x;
  out += thread * 32;
  D decoder;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    typename D::Part words;
    words.load(in + (thread >> 5) * D::kBytes, thread & 31, part);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4];
      decoder.decode(4 * part + step, words, a, half);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[16 * part + 4 * step + i] = a[i];
    }
  }
}

// Kernels <entry>_<type of x>[_<type of scales>], and what sums are multiplied by.
#define GM_PASTE(entry, name) entry##_##name
#define GM_NAME(entry, name) GM_PASTE(entry, name)
#define GM_DECODE(type, T)                                                                         \
  extern "C" __global__ void GM_NAME(GM_ENTRY, type)(const uint8_t* in, uint32_t* out, int half) { \
    decode<GM_DECODER(T)>(in, out, half);                                                          \
  }                                                                                                \
  extern "C" __global__ void GM_NAME(GM_ENTRY, type##_factor)(float* out) { *out = GM_DECODER(T)::kFactor; }
#define GM_OPERAND_fp16(scales, ...)                                                                  \
  extern "C" __global__ void GM_NAME(GM_ENTRY, fp16_##scales)(uint32_t in, uint32_t* out, int half) { \
    operand<__VA_ARGS__>(in, out, half);                                                              \
  }                                                                                                   \
  extern "C" __global__ void GM_NAME(GM_ENTRY, fp16_##scales##_factor)(float* out) {                  \
    *out = __VA_ARGS__::kFactor;                                                                      \
  }
#ifdef GM_FP16_ONLY  // sm_75 has no bf16
#define GM_DECODE_BF16
#define GM_OPERAND_bf16(...)
#else
#define GM_DECODE_BF16 GM_DECODE(bf16, __nv_bfloat16)
#define GM_OPERAND_bf16(scales, ...)                                                                  \
  extern "C" __global__ void GM_NAME(GM_ENTRY, bf16_##scales)(uint32_t in, uint32_t* out, int half) { \
    operand<__VA_ARGS__>(in, out, half);                                                              \
  }                                                                                                   \
  extern "C" __global__ void GM_NAME(GM_ENTRY, bf16_##scales##_factor)(float* out) {                  \
    *out = __VA_ARGS__::kFactor;                                                                      \
  }
#endif
#define GM_OPERAND(type, scales, ...) GM_OPERAND_##type(scales, __VA_ARGS__)
