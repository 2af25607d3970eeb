"""Slots of a paged cache: what the operations that write by slot have in common.

Slot s is place s % block_size of block s // block_size. A negative slot means "do not write this token" (padding). A slot
past the cache is an error: on a CPU it raises; a device kernel, which cannot raise without synchronising, never writes it.
No two tokens of one call may have the same slot.
"""

from __future__ import annotations

from typing import Any

from gristmill.kernels.common import dtype_name, need


def describe_slots(op: str, slot_mapping: Any, tokens: int, device: Any) -> None:
    """ValueError or TypeError unless `slot_mapping` is a contiguous int64 [tokens] on `device`."""
    need(
        tuple(slot_mapping.shape) == (tokens,),
        f"{op}: slot_mapping must be [{tokens}], got {tuple(slot_mapping.shape)}",
    )
    need(slot_mapping.is_contiguous(), f"{op}: slot_mapping must be contiguous")
    if dtype_name(slot_mapping.dtype) != "int64":
        raise TypeError(f"{op}: slot_mapping must be int64, got {slot_mapping.dtype}")
    need(
        slot_mapping.device == device,
        f"{op}: slot_mapping is on {slot_mapping.device}, the tokens on {device}",
    )


def describe_cache(op: str, name: str, cache: Any, tokens: Any, shape: str) -> None:
    """ValueError or TypeError unless `cache` is [blocks, block_size, *tokens.shape[1:]] with contiguous last dimension."""
    need(
        cache.dim() == tokens.dim() + 1 and cache.shape[2:] == tokens.shape[1:] and cache.shape[1] > 0,
        f"{op}: {name} must be {shape} for tokens {tuple(tokens.shape)}, got {tuple(cache.shape)}",
    )
    need(
        cache.stride(-1) == 1 or cache.shape[-1] == 1,
        f"{op}: the last dimension of {name} must be contiguous, got strides {cache.stride()}",
    )
    need(
        all(
            step >= cache.shape[-1]
            for size, step in zip(cache.shape[:-1], cache.stride()[:-1], strict=True)
            if size > 1
        ),
        f"{op}: {name} is written, but its rows overlap: shape {tuple(cache.shape)} with strides {cache.stride()}",
    )
    if cache.dtype != tokens.dtype:
        raise TypeError(f"{op}: {name} must have the tokens' dtype {tokens.dtype}, got {cache.dtype}")
    need(cache.device == tokens.device, f"{op}: {name} is on {cache.device}, the tokens on {tokens.device}")


def check_slots(op: str, slot_mapping: Any, slots: int) -> None:
    """On a CPU, ValueError for a slot past the cache; nothing on devices, where looking would synchronise."""
    if slot_mapping.device.type != "cpu" or not slot_mapping.numel():
        return
    most = int(slot_mapping.max())
    need(most < slots, f"{op}: slot {most} is past the cache of {slots} slots")


def store(tokens: Any, cache: Any, slot_mapping: Any) -> None:
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


def random_slots(tokens: int, blocks: int, block_size: int, generator: Any) -> Any:
    """Distinct slots in random order, about one in five replaced by −1."""
    import torch

    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    return slots
