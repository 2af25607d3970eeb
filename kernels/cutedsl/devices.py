"""Facts of sm_100 and sm_103 that choices of tiles rest on; CuTe DSL is not needed here."""

PROCESSORS = 148
"""Multiprocessors of a target that does not say how many it has: those of a B200."""
SHARED_BYTES = 227 << 10
"""Shared memory that a CTA may have."""
TENSOR_COLUMNS = 512
"""Columns of tensor memory, 32 bits of 128 lanes each."""
