// Lists of the calls that a thread makes, to make them again without Python (kernels/call_list.py).
#pragma once
#include <cstdint>

// Make a call again, with the structs that it had.
using GmReplay = int (*)(const void* call, const void* options);

// Every entry of GM_CPU_CALL says so before it runs. Nothing happens unless this thread records.
extern "C" void gm_note_call(GmReplay replay, const void* call, int64_t call_bytes, const void* options,
                             int64_t option_bytes);
