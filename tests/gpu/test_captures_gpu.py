"""A graph that is garbage and is freed during a capture invalidates the capture; `capturing` prevents that."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing

pytestmark = pytest.mark.gpu


class Owner:
    """Holds a graph and a reference to itself, so that only a collection frees it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.graph = torch.cuda.CUDAGraph()
        vars(self)["me"] = self
        with capturing(self.graph):
            x.add_(1)


def collect_eagerly() -> None:
    """Makes a full collection follow every few allocations.

    Older objects are frozen. Otherwise their number would have to grow by a quarter before a full collection
    runs.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.set_threshold(1, 1, 1)


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    collect_eagerly()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    torch.cuda.synchronize()


def capture_while_an_owner_goes(capture: Callable[..., Any]) -> torch.cuda.CUDAGraph:
    x, graph = torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
    owners = [Owner(x)]
    with capture(graph):
        owners.clear()
        lists = [[index] for index in range(1000)]  # allocates as launchers do
        x.add_(len(lists))
    return graph


def test_the_fault_is_real() -> None:
    """Runs in a process of its own: an invalidated capture leaves torch's allocator in an undefined state."""
    program = (
        "import torch\n"
        "from tests.gpu.test_captures_gpu import capture_while_an_owner_goes, collect_eagerly\n"
        "collect_eagerly()\n"
        "capture_while_an_owner_goes(torch.cuda.graph)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    process = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode != 0 and "during capture" in process.stderr, process.stderr


@pytest.mark.usefixtures("eager_collector")
def test_capturing_holds_it_off() -> None:
    capture_while_an_owner_goes(capturing).replay()
    torch.cuda.synchronize()


def test_a_failed_capture_leaves_random_numbers_and_the_stream_usable() -> None:
    before, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.zeros(64, device="cuda")
    with pytest.raises(RuntimeError), capturing(torch.cuda.CUDAGraph()), torch.cuda.stream(side):
        side.wait_stream(before)
        x.add_(1)  # on a stream that never joins
        torch.cuda.synchronize()  # not allowed in a capture
    assert torch.cuda.current_stream() == before
    assert torch.isfinite(torch.randn(64, device="cuda")).all()
    with capturing(torch.cuda.CUDAGraph()):
        x.uniform_()
