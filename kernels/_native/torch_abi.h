// The part of torch's stable C ABI that the CPU kernels use (torch/csrc/stable/c/shim.h, torch 2.10 and newer).
// Declared here so that building needs no torch; tests/native checks these lines against torch's own header,
// ci/check_symbols.py the built library.
#pragma once
#include <cstdint>

extern "C" {
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                           void (*body)(int64_t, int64_t, void*), void* context);
int32_t torch_get_num_threads(uint32_t* out_num_threads);
}
