"""A Triton kernel that writes both noises of sampling side by side; used by test_sample.py."""

from __future__ import annotations

from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.sampling._philox_triton import gumbel, rough_gumbel


@jit
def both_noises(exact, rough, seed, index, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, index = tl.load(seed), tl.load(index)
    tl.store(exact + place, gumbel(seed, index, place))
    tl.store(rough + place, rough_gumbel(seed, index, place))
