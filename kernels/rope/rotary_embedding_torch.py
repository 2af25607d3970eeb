"""Rotary embedding by torch: the reference itself, which neither synchronises nor loops over tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.rope.rotary_embedding import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import RotaryEmbeddingCall


def launch(config: Config, call: RotaryEmbeddingCall) -> None:
    """q [T, Hq, D] and k [T, Hk, D] or None, in place; positions [T], cos_sin [P, rot]."""
    reference(call.q, call.k, call.positions, call.cos_sin, call.interleaved)


KERNEL = Kernel(
    op="rotary_embedding",
    name="rotary_embedding_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="gather, two products, a sum and a copy in float32",
    batch_invariant=True,
)
