"""The place of a process among the ranks of a model: all that a layer knows about other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gristmill.kernels.collective.groups import enter


@dataclass(frozen=True)
class Mesh:
    """Rank `rank` of `world` ranks, each with its part of every weight that is cut.

    device: of this rank, ``cpu`` or ``cuda:<index>``. group: the name of the process group that collectives take
    (`gristmill.kernels.collective.groups`); "" for a world of one. spreads_context: each rank has a part of every context (MLA).
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    group: str = ""
    spreads_context: bool = False


ALONE = Mesh()
"""A model in one process."""


def least(value: int, mesh: Mesh) -> int:
    """The least value of all ranks; every rank has to call it."""
    if mesh.world == 1:
        return value
    values = torch.tensor([value], dtype=torch.int64, device=mesh.device)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MIN, enter(mesh.group, mesh.world))
    return int(values)
