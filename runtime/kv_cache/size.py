"""The number of blocks of the paged KV cache, and its allocation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gristmill.autotune.device import cpu_memory
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.groups import KVGroup
from gristmill.runtime.kv_cache.paged import PagedCache, token_bytes
from gristmill.runtime.models import Model

CPU_CACHE_BYTES = 1 << 30
"""The largest default cache on a CPU, in bytes."""
CUDA_MEMORY = 0.85
"""The default cache on a GPU, as a fraction of the memory that is free after the weights are loaded."""

SMALL, BIG = (64, 2048), (256, 8192)
"""Default requests and tokens per step: of a CPU and of a GPU with less memory than `BIG_MEMORY`; of other GPUs."""
BIG_MEMORY = 40 << 30


def step_limits(device: torch.device, max_seqs: int | None, max_batch_tokens: int | None) -> tuple[int, int]:
    """Requests and tokens per step: the given ones, or for None those that suit the device."""
    is_big = device.type == "cuda" and torch.cuda.mem_get_info(device)[1] >= BIG_MEMORY
    seqs, tokens = BIG if is_big else SMALL
    seqs = seqs if max_seqs is None else max_seqs
    return seqs, max(tokens, seqs) if max_batch_tokens is None else max_batch_tokens


def cache_blocks(
    model: Model,
    block_size: int,
    memory: int | float | None,
    max_seqs: int,
    max_model_len: int,
    draft: Model | None = None,
    groups: Sequence[KVGroup] = (),
    spare: int = 0,
    beside: int = 0,
) -> int:
    """Blocks of `block_size` tokens that fit in the memory for the cache.

    Args:
        memory: bytes (an int), or a fraction of the free memory (a float up to 1). None: `CUDA_MEMORY` of a GPU's free memory; on a CPU the
            need of max_seqs sequences of max_model_len tokens, at most `CPU_CACHE_BYTES`, and at least one sequence.
        draft: a draft model, whose cache has as many blocks in the same memory, and `spare` more.
        groups: the groups of the cache; a block holds its tokens in the layers of one of them.
        beside: bytes that are not free now, and will be soon.

    Raises:
        UsageError: memory is too small for one block.
    """
    device = model.plans.device
    sizes = [
        block_size * token_bytes(each.config, each.plans.dtype, each.plans.cache_format, of_groups)
        for each, of_groups in ((model, groups), (draft, ()))
        if each is not None
    ]
    block_bytes = sum(sizes)
    whole = cdiv(max_model_len, block_size)
    whole *= max(1, len(groups))
    if memory is None and device.type == "cpu":
        return max(whole, min(max_seqs * whole, CPU_CACHE_BYTES // block_bytes))
    share = CUDA_MEMORY if memory is None else memory
    size = int(share * (_free_bytes(device) + beside) if isinstance(share, float) else share)
    count = (size - spare * sizes[-1]) // block_bytes
    if count < 1:
        raise UsageError(f"memory {memory!r} does not hold one cache block of {block_bytes} bytes")
    return count


def make_cache(model: Model, num_blocks: int, block_size: int, groups: Sequence[KVGroup] = ()) -> PagedCache:
    """The cache of a model; UsageError with its size if the allocation fails."""
    plans = model.plans
    try:
        return PagedCache(
            model.config, num_blocks, block_size, plans.dtype, plans.device, plans.cache_format, groups
        )
    except (OSError, OverflowError, MemoryError, torch.OutOfMemoryError) as error:
        size = num_blocks * block_size * token_bytes(model.config, plans.dtype, plans.cache_format, groups)
        raise UsageError(
            f"a cache of {num_blocks} blocks of {block_size} tokens takes {size} bytes, more than {model.plans.device} gives: "
            f"{error}; lower num_blocks, memory or max_seqs"
        ) from error


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return cpu_memory()[0]
