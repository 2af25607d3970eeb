// In the place of kernels/_native/sm90/ptx.cuh: sm80_fibers.h and attention_fibers.h have what the schedules use of it.
#pragma once
