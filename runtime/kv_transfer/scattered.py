"""Scattered blocks: the operation ``copy_blocks`` copies them from memory of another process that this device reads, and hashes them, in one launch
for each plane of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill import ops
from gristmill.kernel_registry.plan import bucket_sizes
from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.kv_transfer.digests import BlockDigests

LONG_RUN = 256 << 10
"""Bytes from which on a run of neighbours in a row is copied faster by the engines of a GPU for copies, one call for a run."""
WORD = 4
"""Bytes of a word."""


class ScatteredBlocks:
    """Copies of scattered blocks into the planes of a cache.

    Args:
        planes: as of `cache_tensors`.
        digests: of these planes.
        policy: as of `gristmill.ops.bind`.

    Raises:
        NoKernelError: no kernel can run the operation here under the policy.
    """

    def __init__(self, planes: Sequence[Tensor], digests: BlockDigests, policy: Policy | None) -> None:
        self._part = max(plane.shape[2] for plane in planes)
        self._planes = [plane.view(torch.int32) for plane in planes]
        self._factors = digests.factors
        # Verified now: later the blocks of a request would have to wait for it.
        most = planes[0].shape[1]
        sizes = [size for size in bucket_sizes() if size < 2 * most]
        self._plans = [
            ops.bind(
                "copy_blocks", {"rows": plane.shape[0], "words": plane.shape[2]}, plane.device, policy
            ).prepare(sizes)
            for plane in self._planes
        ]

    @staticmethod
    def takes(planes: Sequence[Tensor]) -> bool:
        """Whether the parts of all blocks are made of words, which copies and digests read."""
        return all(plane.shape[2] % WORD == 0 and plane.data_ptr() % WORD == 0 for plane in planes)

    def are(self, *blocks: NDArray[np.int64]) -> bool:
        """Whether there are too few neighbours, on all sides, for copies of runs. An array for each side: the places of the blocks there."""
        apart = np.zeros(max(0, len(blocks[0]) - 1), bool)
        for side in blocks:
            apart |= np.diff(side) != 1
        return len(blocks[0]) * self._part < LONG_RUN * (1 + int(apart.sum()))

    def copy(self, sources: Sequence[Tensor], blocks: NDArray[np.int64], into: NDArray[np.int64]) -> Tensor:
        """Copy `blocks` of planes int32 [rows, blocks, words], which may be another process's, to the blocks `into`, in the order of the current
        stream. Returns the sums of `BlockDigests`, int64 [rows, blocks]."""
        device = self._factors[0].device
        theirs, ours = (torch.from_numpy(side).to(device) for side in (blocks, into))
        sums = []
        for plan, source, plane, factors in zip(
            self._plans, sources, self._planes, self._factors, strict=True
        ):
            out = torch.empty((plane.shape[0], len(blocks)), dtype=torch.int64, device=device)
            plan(source, plane, theirs, ours, factors, out)
            sums.append(out)
        return torch.cat(sums)
