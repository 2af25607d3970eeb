// The kernels of decode on Hopper, which _paged_decode_sm90.cu and _paged_decode_softcap_sm90.cu compile
// without and with a soft cap: two sources, so that the code of one does not depend on the other.
#pragma once
#include "_paged_decode_sm90.cuh"
#include "gm_cuda.h"

#define GM_EACH(K)                           \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 64)  \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 80)  \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 96)  \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 128) \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 192) \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 256) \
  K(fp16, 1, gm::Floats<__half>, 64)         \
  K(fp16, 1, gm::Floats<__half>, 80)         \
  K(fp16, 1, gm::Floats<__half>, 96)         \
  K(fp16, 1, gm::Floats<__half>, 128)        \
  K(fp16, 1, gm::Floats<__half>, 192)        \
  K(fp16, 1, gm::Floats<__half>, 256)        \
  K(codes, 0, gm::Codes, 64)                 \
  K(codes, 0, gm::Codes, 80)                 \
  K(codes, 0, gm::Codes, 96)                 \
  K(codes, 0, gm::Codes, 128)                \
  K(codes, 0, gm::Codes, 192)                \
  K(codes, 0, gm::Codes, 256)

#ifndef __CUDACC__

// Launches the kernel with a soft cap. dtype, head_dim: of GM_EACH.
extern "C" int gm_paged_decode_softcap_sm90(const gm::DecodeParams* p, const gm::SoftCap<true>* cap,
                                            int dtype, int head_dim, const gm::Launch* shape, int device,
                                            void* stream);

#endif
