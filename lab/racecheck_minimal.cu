// Does racecheck see the order "all lanes read, __syncwarp, lane 0 arrives, the producer waits, bulk copy"?
// EVERY = 1: all lanes arrive.
#include <cstdint>
#include <cstdio>
__device__ uint32_t s32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra "
      "W;\nD:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
template <int EVERY>
__global__ void ring(const int* in, int* out, int rounds) {
  __shared__ __align__(128) int slot[32];
  __shared__ __align__(8) uint64_t full, empty;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(s32(&full)) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(s32(&empty)), "r"(EVERY ? 32 : 1)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 32) {
    for (int i = 0; i < rounds; ++i) {
      if (i > 0) wait(s32(&empty), (i - 1) & 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(s32(&full)) : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];" ::"r"(
              s32(slot)),
          "l"(in + i * 32), "r"(s32(&full))
          : "memory");
    }
  } else if (threadIdx.x < 32) {
    int sum = 0;
    for (int i = 0; i < rounds; ++i) {
      wait(s32(&full), i & 1);
      sum += slot[threadIdx.x ^ 5];
      if (EVERY) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(s32(&empty)) : "memory");
      } else {
        __syncwarp();
        if (threadIdx.x == 0)
          asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(s32(&empty)) : "memory");
      }
    }
    out[threadIdx.x] = sum;
  }
}
int main(int argc, char** argv) {
  int *in, *out, h[32];
  cudaMalloc(&in, 64 * 128);
  cudaMalloc(&out, 128);
  int host[64 * 32];
  for (int i = 0; i < 64 * 32; ++i) host[i] = i;
  cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
  if (argc > 1)
    ring<1><<<1, 64>>>(in, out, 64);
  else
    ring<0><<<1, 64>>>(in, out, 64);
  cudaMemcpy(h, out, 128, cudaMemcpyDeviceToHost);
  long want = 0, got = 0;
  for (int v : host) want += v;
  for (int v : h) got += v;
  printf("%s %s\n", cudaGetErrorString(cudaGetLastError()), got == want ? "sum right" : "SUM WRONG");
}
