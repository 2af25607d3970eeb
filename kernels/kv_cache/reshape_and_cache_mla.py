"""Writing the latents of new tokens into MLA's paged cache: one row a token, key and value at once (DeepSeek-V2, 2024).

A separate operation, not reshape_and_cache without values: a plan then knows what it writes, and no kernel branches.
"""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import FLOATS, ITEM_BYTES, dtype_name, need, torch_dtype
from gristmill.kernels.kv_cache.slots import check_slots, describe_cache, describe_slots, random_slots, store

NAME = "reshape_and_cache_mla"


def reference(latent: Any, cache: Any, slot_mapping: Any) -> None:
    """latent [T, D] (512 + 64 = 576 in DeepSeek); cache [blocks, block_size, D], written in place.

    Token t goes to slot slot_mapping[t] (int64): place slot % block_size of block slot // block_size; −1 = not written.
    """
    check_slots(NAME, slot_mapping, cache.shape[0] * cache.shape[1])
    store(latent, cache, slot_mapping)


def describe(latent: Any, cache: Any, slot_mapping: Any) -> dict[str, Any]:
    """Axis values of a call; ValueError or TypeError for arguments that do not fit."""
    need(latent.dim() == 2, f"{NAME}: latent must be [tokens, size], got {tuple(latent.shape)}")
    need(
        latent.stride(1) == 1 or latent.shape[1] == 1,
        f"{NAME}: a latent must be contiguous, got {latent.stride()}",
    )
    describe_cache(NAME, "cache", cache, latent, "[blocks, block_size, size]")
    describe_slots(NAME, slot_mapping, latent.shape[0], latent.device)
    return {
        "t": latent.shape[0],
        "d": latent.shape[1],
        "block_size": cache.shape[1],
        "x": dtype_name(latent.dtype),
    }


def guard(problem: Problem, latent: Any, cache: Any, slot_mapping: Any) -> int:
    """Tokens of a planned call; ValueError if it is not one of `problem`."""
    (_, _), (_, d), (_, size), (_, x) = problem.values
    tokens, kind = latent.shape[0], latent.dtype
    if (
        latent.shape == (tokens, d)
        and cache.shape[1:] == (size, d)
        and slot_mapping.shape == (tokens,)
        and dtype_name(kind) == x
        and cache.dtype == kind
        and dtype_name(slot_mapping.dtype) == "int64"
        and cache.is_contiguous()
        and slot_mapping.is_contiguous()
        and latent.stride(1) == 1
    ):
        return int(tokens)
    # Anything else is described whole: other strides of the cache pass, and what does not fit is named.
    found = describe(latent, cache, slot_mapping)
    for name, planned in problem.values:
        if planned is not None and found[name] != planned:
            raise ValueError(f"{NAME} planned for {problem}: got {found}")
    return int(found["t"])


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random latents for distinct slots of a cache with room for twice as many; about one in five is not written."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    t, d, size = (problem.integer(axis) for axis in ("t", "d", "block_size"))
    dtype, blocks = torch_dtype(problem.text("x")), -(-2 * t // size) + 1
    latent, cache = torch.randn(t, d, generator=generator), torch.randn(blocks, size, d, generator=generator)
    return [
        latent.to(dtype).to(device),
        cache.to(dtype).to(device),
        random_slots(t, blocks, size, generator).to(device),
    ]


def cost(problem: Problem) -> Cost:
    """Every latent read once and written once."""
    t, d = problem.integer("t"), problem.integer("d")
    return Cost(bytes=t * (2 * d * ITEM_BYTES[problem.text("x")] + 8), flops=0)


OP = Op(
    name=NAME,
    family="kv_cache",
    summary="latents of new tokens into MLA's paged cache",
    axes=(
        Axis("t", "int", "tokens", dynamic=True),
        Axis("d", "int", "elements of a latent, rotary part included", default=576, minimum=1),
        Axis("block_size", "int", "tokens of a block", default=64, minimum=1),
        Axis("x", "dtype", "dtype of latents and cache", default="bf16", choices=FLOATS),
    ),
    arguments="Tensor latent, Tensor(a!) cache, Tensor slot_mapping",
    outputs=(),
    reference=reference,
    describe=describe,
    guard=guard,
    like=lambda latent, cache, slot_mapping: (),
    inputs=inputs,
    cost=cost,
    tolerance=lambda problem: Tolerance("exact", 0.0),
    bucket="t",
    examples=("t=0,d=16,x=fp32", "t=1,d=1,block_size=1,x=fp32", "t=7,d=33,block_size=3,x=fp16", "t=65,d=576"),
    bench=("t=1", "t=64", "t=4096"),
)
