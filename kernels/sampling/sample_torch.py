"""Sampling by torch: sorted filters, and Philox in int64 tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.sampling.sample import reference

if TYPE_CHECKING:
    from torch import Tensor


def launch(
    config: Config,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    index: Tensor,
    workspace: Tensor | None,
    ids: Tensor,
) -> None:
    """logits [B, V] -> ids [B]. The reference is plain torch operators without synchronisation: this runs it."""
    ids.copy_(reference(logits, temperature, top_k, top_p, min_p, seed, index))


KERNEL = Kernel(
    op="sample",
    name="sample_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.sort and Philox in int64",
    batch_invariant=True,
)
