"""Sampling in C++ for CPUs (`_sample_cpu.cpp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import SampleCall

ENTRY = CallEntry("gm_sample", "sample")


def launch(config: Config, call: SampleCall) -> None:
    """logits [B, V] -> ids [B]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="sample",
    name="sample_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="filters by bisection; float64 noise only for tokens that a float32 bound lets win",
    config=best_config("gm_sample"),
    batch_invariant=True,
    priority=100,
)
