// In the place of CUDA's: the headers of fibers have what the schedules use of it.
#pragma once
