"""Sampling by torch: sorted filters, and Philox in int64 tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.sampling.sample import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import SampleCall


def launch(config: Config, call: SampleCall) -> None:
    """logits [B, V] -> ids [B]. The reference is plain torch operators without synchronisation: this runs it."""
    call.ids.copy_(
        reference(call.logits, call.temperature, call.top_k, call.top_p, call.min_p, call.seed, call.index)
    )


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
