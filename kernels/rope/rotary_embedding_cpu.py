"""Rotary embedding in C++ for CPUs (`_rotary_embedding_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import RotaryEmbeddingCall

ENTRY = CallEntry("gm_rotary_embedding", "rotary_embedding")


def launch(config: Config, call: RotaryEmbeddingCall) -> None:
    """q [T, Hq, D] and k [T, Hk, D] or None, in place; positions [T], cos_sin [P, rot]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="rotary_embedding",
    name="rotary_embedding_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tokens over threads, pairs over lanes, float32 inside",
    config=best_config("gm_rotary_embedding"),
    batch_invariant=True,
    priority=100,
)
