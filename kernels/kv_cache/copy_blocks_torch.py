"""Copies of blocks by torch: the reference, a part of the blocks at a time, because products of words take four times their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.kv_cache.copy_blocks import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import CopyBlocksCall

PART = 64 << 20
"""Bytes of blocks that are copied at a time."""


def launch(config: Config, call: CopyBlocksCall) -> None:
    """The arguments of `copy_blocks.reference`."""
    rows, _, words = call.cache.shape
    step = max(1, PART // (4 * rows * words))
    for first in range(0, call.sums.shape[1], step):
        part = slice(first, first + step)
        call.sums[:, part] = reference(
            call.source, call.cache, call.source_blocks[part], call.cache_blocks[part], call.factors
        )


KERNEL = Kernel(
    op="copy_blocks",
    name="copy_blocks_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="index_select, index_copy_, and a sum of products",
    batch_invariant=True,
)
