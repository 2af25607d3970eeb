"""Slots of a paged cache: what the operations that write by slot have in common.

Slot s is place s % block_size of block s // block_size. A negative slot means "do not write this token" (padding). A slot
past the cache is an error: on a CPU it raises; a device kernel, which cannot raise without synchronising, never writes it.
No two tokens of one call may have the same slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import need

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.random_inputs import Draw


def check_slots(op: str, slot_mapping: Tensor, slots: int) -> None:
    """On a CPU, ValueError for a slot past the cache; no check on devices, where it would synchronise."""
    if slot_mapping.device.type != "cpu" or not slot_mapping.numel():
        return
    largest = int(slot_mapping.max())
    need(largest < slots, f"{op}: slot {largest} is past the cache of {slots} slots")


def store(tokens: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot // block_size, slot % block_size] = tokens, in plain torch without synchronising.

    A token that must not be written repeats the write of another one: same slot, same values. If there is none, slot 0
    is overwritten with its own content.
    """
    import torch

    if not slot_mapping.numel() or not cache.numel():
        return
    if cache.dtype.itemsize == 1:  # torch stores bytes by index, not codes
        tokens, cache = tokens.view(torch.uint8), cache.view(torch.uint8)
    blocks, size = cache.shape[:2]
    is_written = (slot_mapping >= 0) & (slot_mapping < blocks * size)
    row = torch.where(
        is_written,
        torch.arange(is_written.numel(), device=is_written.device),
        is_written.to(torch.uint8).argmax(),
    )
    slot = slot_mapping[row]
    slot = torch.where(is_written.any(), slot, torch.zeros_like(slot))
    block, place = slot // size, slot % size
    values = tokens[row]
    values = torch.where(is_written.any(), values, cache[block, place])
    cache.index_put_((block, place), values)


def random_writes(draw: Draw, tokens: int, block_size: int, *parts: tuple[int, ...]) -> list[Tensor]:
    """Rows of the shapes `parts` for `tokens` tokens, a cache of each part with room for twice as many, and distinct slots in
    random order, about one in five replaced by −1."""
    import torch

    blocks = cdiv(2 * tokens, block_size) + 1
    rows = [draw.normal(tokens, *part) for part in parts]
    caches = [draw.normal(blocks, block_size, *part) for part in parts]
    slots = torch.randperm(blocks * block_size, generator=draw.generator)[:tokens]
    slots[draw.uniform(tokens) < 0.2] = -1
    return [*draw.stored(*rows, *caches), slots.to(draw.device)]
