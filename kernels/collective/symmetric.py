"""Memory that the GPUs of a group write into: allocated and mapped by torch's symmetric memory, once per group.

`_push.h` says how the kernels use it. Ranks get it together, when they join the group on GPUs.
"""

from __future__ import annotations

from ctypes import addressof, c_uint64
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

RANKS = 8
"""Most ranks of a group (kMaxRanks)."""
BUFFERS = 3
BUFFER_BYTES = 8 << 20
"""Bytes that a rank receives in one launch; a longer call is made in several."""
_ABSENT = -(2**31)


@dataclass(frozen=True)
class Symmetric:
    """The memory of one group on this rank, with the options of the entries that use it (`push_params` of `_push.h`).

    Attributes:
        staging: bytes that all ranks map, for torch's own kernels over symmetric memory, with torch's name of the group.
    """

    options: dict[str, int]
    seconds: float
    failed: Tensor
    holds: tuple[object, ...]
    staging: Tensor | None = None
    group_name: str = ""

    def check(self) -> None:
        """RuntimeError if a rank did not send its values in time in a call that has ended."""
        if source := int(self.failed[0]):
            raise RuntimeError(
                f"rank {source - 1} sent nothing for {self.seconds:.0f} s to a collective call of rank {self.options['rank']}: it has "
                "ended or hangs. The results since then are wrong, and the group cannot be used any more; start its processes again"
            )


_MEMORY: dict[str, Symmetric | str] = {}


def share(name: str, group: ProcessGroup, seconds: float) -> None:
    """Allocate and map the memory of a group, whose rank r has the CUDA device r. A collective call.

    A kernel waits at most `seconds` for the values of another rank. Where devices cannot write each other's memory, `symmetric` says so.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    rank, world = group.rank(), group.size()
    if world > RANKS:
        _MEMORY[name] = f"made for up to {RANKS} ranks, not {world}"
        return
    # Every rank tests all pairs, so that all come to the same end.
    apart = [
        (a, b)
        for a in range(world)
        for b in range(world)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        _MEMORY[name] = "GPU {} cannot access the memory of GPU {}".format(*apart[0])
        return
    device = torch.device("cuda", rank)
    try:
        memory = symm_mem.empty(BUFFERS * BUFFER_BYTES // 4, dtype=torch.int32, device=device)
        handle = symm_mem.rendezvous(memory, group)
        staging = symm_mem.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        of_staging = symm_mem.rendezvous(staging, group)
    except RuntimeError as error:  # by the driver or the container; other kernels do not need it
        _MEMORY[name] = f"torch cannot map it: {error}"
        dist.barrier(group)
        return
    memory.fill_(_ABSENT)
    state = torch.zeros(4, dtype=torch.int32, device=device)
    failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    peers = (c_uint64 * world)(*handle.buffer_ptrs)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody sends into memory that is not empty yet
    options = {
        "peers": addressof(peers),
        "state": state.data_ptr(),
        "failed": failed.data_ptr(),
        "limit": int(seconds * 1e9),
        "capacity": BUFFER_BYTES // 16,
        "rank": rank,
        "world": world,
        "sms": torch.cuda.get_device_properties(device).multi_processor_count,
    }
    _MEMORY[name] = Symmetric(
        options, seconds, failed, (memory, handle, of_staging, state, peers), staging, group.group_name
    )


def symmetric(name: str) -> Symmetric:
    """The memory of a group; RuntimeError if it has none, or if a rank has failed."""
    memory = _MEMORY.get(name, "it is not a group of CUDA devices")
    if isinstance(memory, str):
        raise RuntimeError(f"group {name!r} has no symmetric memory: {memory}")
    memory.check()
    return memory


def check(name: str) -> None:
    """RuntimeError if a collective call of the group has ended without the values of a rank. Reads host memory only."""
    memory = _MEMORY.get(name)
    if isinstance(memory, Symmetric):
        memory.check()
