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
    seen = torch.zeros((64, 1 << 20), dtype=torch.int32, device="cuda")
    calls = []

    def call() -> None:
        # No allocation and no new kernel: either would wait for the whole device.
        if not torch.cuda.is_current_stream_capturing():
            seen[len(calls)].copy_(places)
            calls.append(True)
        else:
            places.clone()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        seen[-1].copy_(places)
    places.fill_(-1)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    places.fill_(7)
    timing.Timed(call, "cuda:0").sample()
    torch.cuda.synchronize()
    assert calls and bool((seen[: len(calls)] == 7).all())
