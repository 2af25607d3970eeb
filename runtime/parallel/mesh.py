"""The place of a process among the ranks of a model: all that a layer knows about other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gristmill.kernels.collective.groups import enter
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import UsageError


@dataclass(frozen=True)
class Mesh:
    """Rank `rank` of `world` ranks, each with its range of every weight that is sharded.

    Attributes:
        device: the device of this rank, ``cpu`` or ``cuda:<index>``.
        group: the name of the process group that collectives take (`gristmill.kernels.collective.groups`); "" for a world of one.
        context_parallel: whether each rank has a part of every context, with all KV heads.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    group: str = ""
    context_parallel: bool = False

    @property
    def context_ranks(self) -> int:
        """The ranks that share each context: all, or this one alone."""
        return self.world if self.context_parallel else 1


ALONE = Mesh()
"""A model in one process."""


def greatest(values: Sequence[int], mesh: Mesh) -> list[int]:
    """By place, the greatest value of all ranks; every rank has to call it."""
    if mesh.world == 1:
        return [*values]
    held = torch.tensor(values, dtype=torch.int64, device=mesh.device)
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX, enter(mesh.group, mesh.world))
    return [int(value) for value in held.tolist()]


def least(value: int, mesh: Mesh) -> int:
    """The least value of all ranks; every rank has to call it."""
    return -greatest([-value], mesh)[0]


def local_config(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """The configuration as the layers of a rank see it: with its own heads. Every other size is that of the whole model.

    Raises:
        UsageError: heads that the ranks cannot share; the message lists the numbers of ranks that can.
    """
    if mesh.world == 1:
        return config
    heads, world, shared = config.num_heads, mesh.world, mesh.context_parallel
    counts = sorted({config.num_kv_heads, *(layer.kv_heads for layer in config.layer_attention)})

    def fits(ranks: int) -> bool:
        return heads % ranks == 0 and (shared or all(n % ranks == 0 or ranks % n == 0 for n in counts))

    def own(kv_heads: int) -> int:
        return kv_heads if shared else max(1, kv_heads // world)

    if not fits(world):
        good = ", ".join(str(ranks) for ranks in range(1, heads + 1) if fits(ranks))
        raise UsageError(
            f"tensor_parallel={world}: {heads} query heads and {' and '.join(map(str, counts))} KV heads of {config.architecture} cannot be "
            f"shared by {world} ranks; these numbers of ranks can: {good}"
        )
    return replace(
        config,
        num_heads=heads // world,
        num_kv_heads=own(config.num_kv_heads),
        layer_attention=tuple(
            replace(layer, kv_heads=own(layer.kv_heads)) for layer in config.layer_attention
        ),
    )
