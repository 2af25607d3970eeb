"""Paged cache writes by torch: the reference, indexed stores without synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.kv_cache.reshape_and_cache import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import ReshapeAndCacheCall


def launch(config: Config, call: ReshapeAndCacheCall) -> None:
    """The arguments of `reshape_and_cache.reference`."""
    reference(
        call.key, call.value, call.key_cache, call.value_cache, call.slot_mapping, call.k_scale, call.v_scale
    )


KERNEL = Kernel(
    op="reshape_and_cache",
    name="reshape_and_cache_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="index_put_",
    batch_invariant=True,
)
