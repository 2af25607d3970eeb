"""Paged cache writes by torch: the reference, indexed stores without synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.kv_cache.reshape_and_cache import reference

if TYPE_CHECKING:
    from torch import Tensor


def launch(
    config: Config,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """The arguments of `reshape_and_cache.reference`."""
    reference(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


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
