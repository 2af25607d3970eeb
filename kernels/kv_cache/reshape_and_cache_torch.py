"""Paged cache writes by torch: the reference, indexed stores without synchronisation."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.kv_cache.reshape_and_cache import reference


def launch(config: Config, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> None:
    """key [T, H, D], value [T, H, Dv] -> key_cache, value_cache [blocks, block_size, H, D or Dv] by slot_mapping [T]."""
    reference(key, value, key_cache, value_cache, slot_mapping)


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
