"""Workers that are forks use the device beside the process that they come from; where the driver was initialized before, new processes do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
from gristmill.autotune import forks
from gristmill.autotune.worker import forked_workers, shared_workers
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.targets.probe import probe_cuda

BEFORE
op = default_registry().op("rms_norm")
with forked_workers(), shared_workers().allow(2):
    x = torch.ones(4, device="cuda")
    for _ in range(2):
        with shared_workers().one() as a, shared_workers().one() as b:
            for worker in (a, b):
                outcome = worker.verify(
                    op, default_registry().kernel("rms_norm", "rms_norm_torch"), {}, op.problem("m=4,n=64"), "cuda:0"
                )
                assert outcome["ok"], outcome
                print(worker.is_fork, end=" ")
    assert (x + 1).sum().item() == 8
"""


@pytest.mark.parametrize(
    ("before", "is_fork"),
    [("", True), ("probe_cuda()", False), ("torch.cuda.is_available()", False), ("torch.cuda.init()", False)],
    ids=["fresh", "planted: the driver", "planted: torch asks", "planted: torch uses it"],
)
def test_forks_verify_on_a_device(before: str, is_fork: bool) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BEFORE", before)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{is_fork} " * 4), done.stderr
