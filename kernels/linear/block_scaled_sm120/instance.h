// The kernels of one format, seen by the host.
#pragma once
#include "gm_cuda.h"
#include "params.h"

namespace gm::block_scaled {

struct Instance {
  int mt, warps, slots;
  CudaKernel kernel;
};

// The instance of this shape; null if there is none.
template <int COUNT>
Instance* find(Instance (&instances)[COUNT], int mt, int warps) {
  for (Instance& one : instances)
    if (one.mt == mt && one.warps == warps) return &one;
  return nullptr;
}

// Bytes of the ring of slots; scales of x have room for a multiple of 32 rows.
template <typename Slot>
int ring_bytes(const Instance& one) {
  const int rows = one.warps * kWarpRows, x_rows = (one.mt + 31) / 32 * 32;
  return one.slots * ((one.mt + rows) * Slot::kBytes + (x_rows + rows) * Slot::kScales);
}

}  // namespace gm::block_scaled
