"""Slots of a paged cache: what the operations that write by slot have in common.

Slot s is place s % block_size of block s // block_size. A negative slot means "do not write this token" (padding). A slot
past the cache is an error: on a CPU it raises; a device kernel, which cannot raise without synchronising, never writes it.
No two tokens of one call may have the same slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernels.common import need

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def check_slots(op: str, slot_mapping: Tensor, slots: int) -> None:
    """On a CPU, ValueError for a slot past the cache; nothing on devices, where looking would synchronise."""
    if slot_mapping.device.type != "cpu" or not slot_mapping.numel():
        return
    most = int(slot_mapping.max())
    need(most < slots, f"{op}: slot {most} is past the cache of {slots} slots")


def store(tokens: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot // block_size, slot % block_size] = tokens, in plain torch without synchronising.

    A token that must not be written repeats another one's write: same slot, same values. If none is to be written, slot 0
    is written with what it holds.
    """
    import torch

    if not slot_mapping.numel() or not cache.numel():
        return
    blocks, size = cache.shape[:2]
    wanted = (slot_mapping >= 0) & (slot_mapping < blocks * size)
    row = torch.where(
        wanted, torch.arange(wanted.numel(), device=wanted.device), wanted.to(torch.uint8).argmax()
    )
    slot = slot_mapping[row]
    slot = torch.where(wanted.any(), slot, torch.zeros_like(slot))
    block, place = slot // size, slot % size
    values = tokens[row]
    values = torch.where(wanted.any(), values, cache[block, place])
    cache.index_put_((block, place), values)


def random_slots(tokens: int, blocks: int, block_size: int, generator: torch.Generator) -> Tensor:
    """Distinct slots in random order, about one in five replaced by −1."""
    import torch

    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator, dtype=torch.float32) < 0.2] = -1
    return slots
