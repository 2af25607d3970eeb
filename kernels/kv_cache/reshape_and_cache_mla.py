"""Writing the latents of new tokens into MLA's paged cache: one row per token, key and value at once (DeepSeek-V2, 2024).

A separate operation, not reshape_and_cache without values: a plan then knows what it writes, and no kernel branches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.kv_cache.slots import check_slots, random_writes, store
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

NAME = "reshape_and_cache_mla"


def reference(latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """latent [T, D] (512 + 64 = 576 in DeepSeek); cache [blocks, block_size, D], written in place.

    Token t goes to slot slot_mapping[t] (int64): place slot % block_size of block slot // block_size; −1 = not written.
    """
    check_slots(NAME, slot_mapping, cache.shape[0] * cache.shape[1])
    store(latent, cache, slot_mapping)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random latents for distinct slots of a cache with room for twice as many; about one in five is not written."""
    t, d, size = problem.integers("t", "d", "block_size")
    return random_writes(Draw(problem, seed, device), t, size, (d,))


def cost(problem: Problem) -> Cost:
    """Every latent read once and written once."""
    t, d = problem.integers("t", "d")
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
    arguments=(
        Tensor("latent", "t d", strides=VECTORS),
        Tensor("cache", "blocks block_size d", strides=VECTORS, mutable=True),
        Tensor("slot_mapping", "t", dtype="int64"),
    ),
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=lambda problem: Tolerance("exact", 0.0),
    bucket="t",
    examples=("t=0,d=16,x=fp32", "t=1,d=1,block_size=1,x=fp32", "t=7,d=33,block_size=3,x=fp16", "t=65,d=576"),
    bench=("t=1", "t=64", "t=4096"),
)
