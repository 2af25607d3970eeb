// Sampling in one launch: a cluster of blocks per row (_sample_sm90.cuh). See sample.py for the definition.
#include <cstdint>

#include "gm_cuda.h"
#ifdef __CUDACC__
#include "_cluster_sm90.cuh"
#endif
#include "_sample_sm90.cuh"

#ifdef __CUDACC__

extern __shared__ __align__(16) unsigned char memory[];

// The second form runs two blocks of 512 threads per multiprocessor, or four of 256: 64 registers per thread.
#define GM_SAMPLE(name, type, kept, ...)                                                                   \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ SampleParams p) { \
    gm::Row<type, kept>(p, memory).run();                                                                  \
  }
GM_SAMPLE(sample_fp32, float, true, 512)
GM_SAMPLE(sample_bf16, uint16_t, true, 512)
GM_SAMPLE(sample_again_fp32, float, false, 512, 2)
GM_SAMPLE(sample_again_bf16, uint16_t, false, 512, 2)

#else
#include "calls/sample.h"

static gm::CudaKernel g_sample[2][2] = {{{GM_CUBIN, "sample_again_fp32"}, {GM_CUBIN, "sample_again_bf16"}},
                                        {{GM_CUBIN, "sample_fp32"}, {GM_CUBIN, "sample_bf16"}}};

// Options: ranks: blocks per row; threads of each; keep: 1 for slices in shared memory, 0 to read them again.
GM_CUDA_CALL(gm_sample_sm90, Sample, ranks, threads, keep)
(const GmSampleCall& call, const gm_sample_sm90_options& options, int device, void* stream) {
  const int ranks = int(options.ranks), threads = int(options.threads);
  const bool bf16 = call.x_type == 2, keep = options.keep != 0;
  const int64_t v = call.v;
  if (!bf16 && call.x_type != 0) return GM_E_DTYPE;
  if (ranks != 1 && ranks != 2 && ranks != 4 && ranks != gm::kMaxRanks) return GM_E_ARG;
  if (threads != 64 && threads != 128 && threads != 256 && threads != 32 * gm::kMaxWarps) return GM_E_ARG;
  if (options.keep != 0 && options.keep != 1) return GM_E_ARG;
  if (call.m < 0 || call.m > INT32_MAX / ranks || v < 1 || v > gm::kMaxVocabulary) return GM_E_SHAPE;
  if (keep && v > int64_t(ranks) * gm::kMaxSlice) return GM_E_SHAPE;
  if (call.m == 0) return GM_OK;
  const int slice = int((v + 4 * ranks - 1) / (4 * ranks)) * 4;
  int bits = 0;
  while (v >> bits) ++bits;
  const int exponent = 62 - bits < gm::kMaxExponent ? 62 - bits : gm::kMaxExponent;
  SampleParams p{call.logits,
                 call.logits_stride[0],
                 static_cast<const float*>(call.temperature),
                 static_cast<const int32_t*>(call.top_k),
                 static_cast<const float*>(call.top_p),
                 static_cast<const float*>(call.min_p),
                 static_cast<const int64_t*>(call.seed),
                 static_cast<const int64_t*>(call.index),
                 static_cast<int64_t*>(call.ids),
                 int(v),
                 slice,
                 exponent};
  void* args[] = {&p};
  return g_sample[keep][bf16].launch(device, stream,
                                     {.grid_x = unsigned(call.m) * ranks,
                                      .block = unsigned(threads),
                                      .smem = unsigned(sizeof(gm::Shared)) + (keep ? 4 * slice : 0),
                                      .cluster = unsigned(ranks),
                                      .pdl = true},
                                     args);
}

#endif
