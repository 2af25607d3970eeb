"""Timing on the GPU: what is timed never runs ahead of what made its arguments."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune import timing

pytestmark = pytest.mark.gpu


def test_timed_calls_wait_for_their_arguments() -> None:
    """Arguments still being written on the current stream when timing starts: every call sees them finished.

    A `combine` timed on places that were not written yet read at whatever the memory held: an illegal access.
    """
    places = torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    seen = []

    def call(arguments: list[torch.Tensor]) -> None:
        copy = arguments[0].clone()
        if not torch.cuda.is_current_stream_capturing():
            seen.append(copy)

    torch.cuda._sleep(400_000_000)
    places.fill_(7)
    timing._cuda_sampler(call, [[places]], 0.01, 2)
    torch.cuda.synchronize()
    assert seen and all(bool((copy == 7).all()) for copy in seen)
