// The schedule of decode on Hopper (../sm90/_paged_decode_sm90.cuh) for sm_80 and newer: it is made of mma.sync and cp.async,
// and here fits into the shared memory of smaller multiprocessors.
#pragma once
#include "codes.cuh"

// Programmatic dependent launch, which begins with sm_90, and the conversion of codes.
#define griddepcontrol_launch_dependents()
#define griddepcontrol_wait()
#define e4m3_to_f16 e4m3_by_bits
#include "attention/paged_attention/sm90/_paged_decode_copy_sm90.cuh"

namespace gm {

// As the primary template of DecodeShape, which says what the numbers are. Two CTAs share the 164 KiB of a multiprocessor of sm_80, and one
// has at most 99 KiB on sm_86, sm_89 and sm_120. Heads over 128 have half as many warps.
template <int D, int N, int BYTES>
struct SmallDecodeShape {
  static constexpr int kThreads = D > 128 ? 64 : 128, kWarps = kThreads / 32, kResident = 2;
  static constexpr int kStep = BYTES == 1 && D <= 128 ? 32 : 16;
  static constexpr bool kColumns = false;
  static constexpr int kChunks = D * BYTES / 16, kQRow = D * 2 + 16, kRow = BYTES == 2 ? kQRow : D,
                       kTile = kStep * kRow, kScales = BYTES == 1 ? kStep * 8 : 0;
  static constexpr int kStage = 2 * kTile + kScales, kPitch = D + 4;
  static constexpr int kQ = 0, kRing = N * kQRow, kStatsBytes = kWarps * N * 8, kLimit = 80 << 10;
  static constexpr int kFittingStages = (kLimit - kRing - kStatsBytes) / (kWarps * kStage),
                       kStages = kFittingStages < 4 ? kFittingStages : 4;
  static constexpr int kRingBytes = kWarps * kStages * kStage;
  static constexpr int kSums = kRing, kStats = kRing + kRingBytes, kBytes = kStats + kStatsBytes;
  static_assert(kStages >= 2 && kWarps * N * kPitch * 4 <= kRingBytes);
  static constexpr int kSwizzleBits = BYTES == 2         ? 0
                                      : kChunks % 8 == 0 ? 3
                                      : kChunks % 4 == 0 ? 2
                                      : kChunks % 2 == 0 ? 1
                                                         : 0;
};
template <int D, int N>
struct DecodeShape<D, N, 2> : SmallDecodeShape<D, N, 2> {};
template <int D, int N>
struct DecodeShape<D, N, 1> : SmallDecodeShape<D, N, 1> {};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

// As the function of this name for CTAs of 128 threads.
template <typename S, int D, int N>
  requires(S::kThreads != 128)
__device__ __forceinline__ void copy_queries(const DecodeParams& p, uint32_t to, const Segment& segment) {
  constexpr int kChunks = D / 8;
  const int rows = min(segment.seq.queries * p.group, N);
#pragma unroll 4
  for (int piece = threadIdx.x; piece < N * kChunks; piece += S::kThreads) {
    const int row = piece / kChunks, c = piece % kChunks;
    const int token = row * p.by_group >> 16, head = segment.head * p.group + row - token * p.group;
    const char* q = static_cast<const char*>(p.q);
    cp_async_16(to + row * S::kQRow + c * 16,
                row < rows ? q + (segment.seq.token + token) * p.q_token + head * p.q_head + c * 16 : q,
                row < rows ? 16 : 0);
  }
}

}  // namespace gm
#endif

#include "attention/paged_attention/sm90/_paged_decode_sm90.cuh"
