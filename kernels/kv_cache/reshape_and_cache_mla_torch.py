"""Paged writes of MLA latents by torch: the reference, indexed stores without synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.kv_cache.reshape_and_cache_mla import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import ReshapeAndCacheMlaCall


def launch(config: Config, call: ReshapeAndCacheMlaCall) -> None:
    """latent [T, D] -> cache [blocks, block_size, D] by slot_mapping [T]."""
    reference(call.latent, call.cache, call.slot_mapping)


KERNEL = Kernel(
    op="reshape_and_cache_mla",
    name="reshape_and_cache_mla_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="index_put_",
    batch_invariant=True,
)
