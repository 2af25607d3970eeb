// The kernels of decode on Hopper, which _paged_decode_sm90.cu and _paged_decode_softcap_sm90.cu compile
// without and with a soft cap: two sources, so that the code of one does not depend on the other.
#pragma once
#include "_paged_decode_sm90.cuh"
#include "gm_cuda.h"

// Name and code of the type of q and out, element type of the caches, elements of a head, rows of a tile, suffix.
#define GM_EACH(K)                                        \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 64, 8, )          \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 80, 8, )          \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 96, 8, )          \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 128, 8, )         \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 192, 8, )         \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 256, 8, )         \
  K(fp16, 1, gm::Floats<__half>, 64, 8, )                 \
  K(fp16, 1, gm::Floats<__half>, 80, 8, )                 \
  K(fp16, 1, gm::Floats<__half>, 96, 8, )                 \
  K(fp16, 1, gm::Floats<__half>, 128, 8, )                \
  K(fp16, 1, gm::Floats<__half>, 192, 8, )                \
  K(fp16, 1, gm::Floats<__half>, 256, 8, )                \
  K(codes, 0, gm::Codes, 64, 8, )                         \
  K(codes, 0, gm::Codes, 80, 8, )                         \
  K(codes, 0, gm::Codes, 96, 8, )                         \
  K(codes, 0, gm::Codes, 128, 8, )                        \
  K(codes, 0, gm::Codes, 192, 8, )                        \
  K(codes, 0, gm::Codes, 256, 8, )                        \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 64, 16, _rows16)  \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 80, 16, _rows16)  \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 96, 16, _rows16)  \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 128, 16, _rows16) \
  K(fp16, 1, gm::Floats<__half>, 64, 16, _rows16)         \
  K(fp16, 1, gm::Floats<__half>, 80, 16, _rows16)         \
  K(fp16, 1, gm::Floats<__half>, 96, 16, _rows16)         \
  K(fp16, 1, gm::Floats<__half>, 128, 16, _rows16)

// The same, of the kernels whose CTAs have eight warps.
#define GM_EACH_WIDE(K)                                        \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 64, 8, _wide)          \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 128, 8, _wide)         \
  K(fp16, 1, gm::Floats<__half>, 64, 8, _wide)                 \
  K(fp16, 1, gm::Floats<__half>, 128, 8, _wide)                \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 64, 16, _rows16_wide)  \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 128, 16, _rows16_wide) \
  K(fp16, 1, gm::Floats<__half>, 64, 16, _rows16_wide)         \
  K(fp16, 1, gm::Floats<__half>, 128, 16, _rows16_wide)

#ifndef __CUDACC__

// Launches the kernel with a soft cap. dtype, head_dim, rows: of GM_EACH.
extern "C" int gm_paged_decode_softcap_sm90(const gm::DecodeParams* p, const gm::SoftCap<true>* cap,
                                            int dtype, int head_dim, int rows, const gm::Launch* shape,
                                            int device, void* stream);

#endif
