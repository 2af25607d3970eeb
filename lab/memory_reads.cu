// How fast a GPU reads keys and values of many sequences from shuffled pages, by what copies them to shared memory, by what the L2 cache
// fetches at a time, and by how much is in flight. Nothing is multiplied; a warp reads each tile once from shared memory, as products do.
//
//     nvcc -O3 -std=c++20 -arch=sm_90a -cudart static -o memory_reads lab/memory_reads.cu && ./memory_reads > memory_reads.json
//
// 64 sequences of 4,096 tokens, 8 KV heads of 128 bf16 elements, pages of 16 tokens: 1,074 MB. A CTA of four warps has an equal piece of one head, each
// warp a ring of stages of 16 keys and their values. Medians of 11 launches by events, which include the launch.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr int kHeads = 8, kRow = 256, kToken = kHeads * kRow, kPage = 16 * kToken, kPages = 64 * 256,
              kWarps = 4;
constexpr int kTile = 16 * kRow;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Piece {
  int head, first, stop;
  __device__ Piece(int pieces) : head(blockIdx.x % kHeads) {
    const int each = (kPages + pieces - 1) / pieces, piece = blockIdx.x / kHeads;
    first = piece * each + threadIdx.x / 32, stop = min((piece + 1) * each, kPages);
  }
};

__device__ uint32_t read_tile(uint32_t at) {
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < 2 * kTile / 512; ++i) {
    uint32_t w[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(at + i * 512 + threadIdx.x % 32 * 16));
    all ^= w[0] ^ w[1] ^ w[2] ^ w[3];
  }
  return all;
}

// By cp.async, two rows of a warp at a time. PITCH: bytes from one row to the next in shared memory.
template <int STAGES, int FETCH, int PITCH>
__global__ void __launch_bounds__(kWarps * 32, 2)
    by_rows(const char* k, const char* v, const int* pages, int pieces, uint32_t* out) {
  extern __shared__ __align__(128) uint8_t smem[];
  constexpr int kStage = 2 * 16 * PITCH;
  const Piece piece(pieces);
  const int lane = threadIdx.x % 32, in = lane / 16, chunk = lane % 16;
  const uint32_t ring =
      static_cast<uint32_t>(__cvta_generic_to_shared(smem)) + threadIdx.x / 32 * STAGES * kStage;
  const auto copy = [&](int page, uint32_t to) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = i % 8 * 2 + in, at = PITCH == kRow ? (chunk ^ (row & 7)) * 16 : chunk * 16;
      const char* from =
          (i < 8 ? k : v) + int64_t(page) * kPage + row * kToken + piece.head * kRow + chunk * 16;
      const uint32_t dst = to + (i < 8 ? 0 : 16 * PITCH) + row * PITCH + at;
      if constexpr (FETCH == 0)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(from));
      if constexpr (FETCH == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(from));
      if constexpr (FETCH == 256)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(dst), "l"(from));
    }
  };
  int step = piece.first, stage = 0;
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (step + i * kWarps < piece.stop) copy(pages[step + i * kWarps], ring + i * kStage);
    asm volatile("cp.async.commit_group;");
  }
  uint32_t all = 0;
  for (; step < piece.stop; step += kWarps) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1));
    __syncwarp();
    all ^= read_tile(ring + stage * kStage);
    __syncwarp();
    if (step + STAGES * kWarps < piece.stop) copy(pages[step + STAGES * kWarps], ring + stage * kStage);
    asm volatile("cp.async.commit_group;");
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  if (all == 1) *out = all;
}

// By TMA, a box of 16 rows each.
template <int STAGES>
__global__ void __launch_bounds__(kWarps * 32, 2)
    by_boxes(const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v, const int* pages,
             int pieces, uint32_t* out) {
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ __align__(8) uint64_t barriers[kWarps * STAGES];
  const Piece piece(pieces);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = (static_cast<uint32_t>(__cvta_generic_to_shared(smem)) + 1023) / 1024 * 1024 +
                        warp * STAGES * 2 * kTile;
  const uint32_t bars = static_cast<uint32_t>(__cvta_generic_to_shared(barriers)) + warp * STAGES * 8;
  if (lane == 0)
    for (int i = 0; i < STAGES; ++i) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bars + i * 8));
  asm volatile("fence.mbarrier_init.release.cluster;");
  __syncthreads();
  const auto copy = [&](int page, int stage) {
    if (lane != 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bars + stage * 8), "r"(2 * kTile));
    for (int i = 0; i < 2; ++i)
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, "
          "%3, %4}], [%5];" ::"r"(ring + stage * 2 * kTile + i * kTile),
          "l"(i == 0 ? &k : &v), "r"(0), "r"(piece.head * 2), "r"(page), "r"(bars + stage * 8)
          : "memory");
  };
  int step = piece.first, stage = 0, parities = 0;
  for (int i = 0; i < STAGES; ++i)
    if (step + i * kWarps < piece.stop) copy(pages[step + i * kWarps], i);
  uint32_t all = 0;
  for (; step < piece.stop; step += kWarps) {
    asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W;}" ::"r"(
                     bars + stage * 8),
                 "r"(parities >> stage & 1)
                 : "memory");
    parities ^= 1 << stage;
    all ^= read_tile(ring + stage * 2 * kTile);
    __syncwarp();
    if (step + STAGES * kWarps < piece.stop) copy(pages[step + STAGES * kWarps], stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  if (all == 1) *out = all;
}

struct Caches {
  char *k, *v;
  int* pages;
  uint32_t* out;
};

bool first = true;  // row of the result

template <typename Launch>
void timed(const char* by, int stages, int fetch, int pitch, Launch launch) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event"), check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 14; ++i) {
    float ms;
    check(cudaEventRecord(begin), by), launch(), check(cudaEventRecord(end), by),
        check(cudaEventSynchronize(end), by);
    check(cudaEventElapsedTime(&ms, begin, end), by);
    if (i >= 3) times.push_back(ms * 1e3f);
  }
  std::nth_element(times.begin(), times.begin() + 5, times.end());
  std::printf(
      "%s\n  {\"by\": \"%s\", \"stages\": %d, \"l2_fetch\": %d, \"row_pitch\": %d, \"us\": %.1f, "
      "\"tb_per_s\": %.3f}",
      first ? "" : ",", by, stages, fetch, pitch, times[5], 2.0 * kPages * kPage / times[5] / 1e6);
  first = false;
}

template <int STAGES, int FETCH, int PITCH>
void time_rows(const Caches& c) {
  const int smem = kWarps * STAGES * 2 * 16 * PITCH, pieces = 33;
  check(
      cudaFuncSetAttribute(by_rows<STAGES, FETCH, PITCH>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem),
      "rows");
  timed("rows", STAGES, FETCH, PITCH, [&] {
    by_rows<STAGES, FETCH, PITCH><<<pieces * kHeads, kWarps * 32, smem>>>(c.k, c.v, c.pages, pieces, c.out);
  });
}

template <int STAGES>
void time_boxes(const Caches& c, int fetch, CUtensorMapL2promotion promotion) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
        "driver");
  CUtensorMap maps[2];
  for (int i = 0; i < 2; ++i) {
    const cuuint64_t sizes[] = {64, 16, 2 * kHeads, kPages}, strides[] = {kToken, 128, kPage};
    const cuuint32_t box[] = {64, 16, 2, 1}, ones[] = {1, 1, 1, 1};
    if (reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
            &maps[i], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, i == 0 ? c.k : c.v, sizes, strides, box, ones,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
      std::exit(2);
  }
  const int smem = kWarps * STAGES * 2 * kTile + 1024, pieces = 33;
  check(cudaFuncSetAttribute(by_boxes<STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem), "boxes");
  timed("boxes", STAGES, fetch, kRow, [&] {
    by_boxes<STAGES><<<pieces * kHeads, kWarps * 32, smem>>>(maps[0], maps[1], c.pages, pieces, c.out);
  });
}

}  // namespace

int main() {
  Caches c{};
  check(cudaMalloc(&c.k, size_t(kPages) * kPage), "keys"),
      check(cudaMalloc(&c.v, size_t(kPages) * kPage), "values");
  check(cudaMemset(c.k, 1, size_t(kPages) * kPage), "keys"),
      check(cudaMemset(c.v, 1, size_t(kPages) * kPage), "values");
  check(cudaMalloc(&c.pages, kPages * sizeof(int)), "pages"), check(cudaMalloc(&c.out, 4), "out");
  std::vector<int> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
  check(cudaMemcpy(c.pages, pages.data(), kPages * sizeof(int), cudaMemcpyHostToDevice), "pages");
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  int driver;
  check(cudaDriverGetVersion(&driver), "driver");
  std::printf("{\"command\": \"./memory_reads\", \"device\": \"%s\", \"cuda_driver\": %d, \"rows\": [",
              device.name, driver);
  time_rows<3, 256, 272>(c), time_rows<3, 128, 272>(c), time_rows<3, 0, 272>(c), time_rows<2, 128, 272>(c);
  time_rows<3, 256, 256>(c), time_rows<3, 128, 256>(c), time_rows<3, 0, 256>(c), time_rows<2, 256, 256>(c),
      time_rows<2, 128, 256>(c);
  time_boxes<3>(c, 256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
      time_boxes<3>(c, 128, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  time_boxes<3>(c, 0, CU_TENSOR_MAP_L2_PROMOTION_NONE),
      time_boxes<2>(c, 256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  time_boxes<2>(c, 128, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  std::printf("\n]}\n");
}
