"""Process groups by name: collective operations take the name, as torch's functional collectives do.

A process joins a group once, after the rendezvous. Every rank of the group then calls the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_GROUPS: dict[str, ProcessGroup] = {}
_CALLBACKS: dict[str, Callable[[], None]] = {}


def join(name: str, group: ProcessGroup, on_call: Callable[[], None] | None = None) -> None:
    """Give a process group its name in this process; ValueError if the name is taken.

    `on_call` is called before each collective call of the group, but not when a captured one is replayed.
    """
    if not name or name in _GROUPS:
        raise ValueError(f"a process group needs a name that is not taken, got {name!r}")
    _GROUPS[name] = group
    if on_call is not None:
        _CALLBACKS[name] = on_call


def rendezvous(
    name: str,
    rank: int,
    world: int,
    device: str,
    file: str,
    seconds: float,
    on_call: Callable[[], None] | None = None,
) -> None:
    """Make this process rank `rank` of `world`, and join the group of all by a name.

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (NCCL; rank r has device r).
        file: a path that all ranks can write, where there is no file yet.
        seconds: how long a rank waits for the others, here and in each call.
        on_call: as in `join`.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{file}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed made no group of all ranks")
    join(name, group, on_call)
    if device == "cuda":
        from gristmill.kernels.collective.symmetric import share

        share(name, group, seconds)


def enter(name: str, world: int) -> ProcessGroup:
    """The process group of a name, for a collective call that begins now; ValueError unless it has `world` ranks."""
    group = _found(name, world)
    if (on_call := _CALLBACKS.get(name)) is not None:
        on_call()
    return group


def _found(name: str, world: int) -> ProcessGroup:
    group = _GROUPS.get(name)
    if group is None:
        raise ValueError(
            f"this process has joined no group {name!r}; it is in {', '.join(map(repr, _GROUPS)) or 'none'}"
        )
    if group.size() != world:
        raise ValueError(f"group {name!r} has {group.size()} ranks, and the call is for {world}")
    return group


def group_of(world: int) -> tuple[str, int]:
    """The name of a group of this process with `world` ranks, and its rank there; ("", 0) if there is none, or for a world of one.

    Arguments with the name "" describe a call of several ranks, and no kernel runs it.
    """
    joined = ((name, int(group.rank())) for name, group in _GROUPS.items() if group.size() == world > 1)
    return next(joined, ("", 0))


def rank_in(name: str, world: int) -> int:
    """The rank of this process in a group of `world` ranks; 0 in a world of one. ValueError as for `enter`."""
    return int(_found(name, world).rank()) if world > 1 else 0


def gathered(x: Tensor, name: str, world: int) -> Tensor:
    """x of every rank, in rank order: [world, *x.shape]. x must be contiguous."""
    import torch
    import torch.distributed as dist

    if world == 1:
        return x[None].clone()
    out = torch.empty(world * x.numel(), dtype=x.dtype, device=x.device)
    # torch 2.13 renamed it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x.view(-1), group=enter(name, world))
    return out.view(world, *x.shape)
