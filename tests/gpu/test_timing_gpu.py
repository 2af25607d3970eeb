"""Timing on the GPU: timed calls wait for the producers of their arguments, and the clock is read."""

from __future__ import annotations

import random
import subprocess

import pytest
import torch

from gristmill.autotune import timing
from gristmill.autotune.candidate import Candidate
from gristmill.autotune.gpu_clock import sm_clock
from gristmill.autotune.place import place
from gristmill.autotune.rotation import Rotation
from gristmill.autotune.rounds import Rounds
from gristmill.kernel_registry.registry import default_registry
from lab.gpu_graphs import Graphs

pytestmark = pytest.mark.gpu


def test_timed_calls_wait_for_their_arguments() -> None:
    """Arguments are still being written on the current stream when timing starts; every timed call sees them
    complete.

    Without this, a timed `combine` reads indices that are not written yet, which is an illegal access.
    """
    places = torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda")
    copies = torch.zeros((64, 1 << 20), dtype=torch.int32, device="cuda")
    calls = []

    def call() -> None:
        # No allocation and no new kernel: either would wait for the whole device.
        if not torch.cuda.is_current_stream_capturing():
            copies[len(calls)].copy_(places)
            calls.append(True)
        else:
            places.clone()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        copies[-1].copy_(places)
    places.fill_(-1)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    places.fill_(7)
    timing.Timed(call, "cuda:0").sample()
    torch.cuda.synchronize()
    assert calls and bool((copies[: len(calls)] == 7).all())


def test_the_clock_is_the_one_that_the_driver_shows() -> None:
    read = sm_clock("cuda:0")
    if torch.version.cuda is None:
        assert read is None
        return
    assert read is not None
    data = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        data = torch.mm(data, data).mul_(1e-2)
    readings = [read() for _ in range(20)]
    torch.cuda.synchronize()
    known = [mhz for mhz in readings if mhz is not None]
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    shown = subprocess.run(
        ["nvidia-smi", f"--id={uuid}", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert len(known) == 20 and all(100 < mhz <= float(shown) for mhz in known), (readings, shown)


@pytest.mark.alone
def test_rounds_have_their_clock(policy_file) -> None:
    policy_file()
    op, device = default_registry().op("rms_norm"), place(None)
    kernel, problem = default_registry().kernel("rms_norm", "rms_norm_triton"), op.problem("m=256,n=4096")
    candidate = Candidate(
        kernel, kernel.config(problem, device.target), Rotation(op, kernel, problem, "cuda:0")
    )
    rounds = Rounds([candidate], clock=sm_clock("cuda:0"))
    rounds.run(9, random.Random(0))
    if torch.version.cuda is not None:
        assert len(rounds.clocks) == 9 and all(mhz and mhz > 100 for mhz in rounds.clocks)
    assert 5 <= len(rounds.steady) <= 9 and len(rounds.kept(candidate.name)) == len(rounds.steady)


def test_graphs_of_lab_replay_their_calls_in_order() -> None:
    x = torch.zeros(1, device="cuda:0")
    graphs = Graphs()
    graphs.add("affine", [lambda: x.add_(1), lambda: x.mul_(2), lambda: x.sub_(3)])
    x.fill_(5)
    samples = graphs.samples(2)
    torch.cuda.synchronize()
    assert graphs.timed["affine"].captured and all(us > 0 for us in samples["affine"])
    assert float(x) == ((5 + 1) * 2 - 3 + 1) * 2 - 3
