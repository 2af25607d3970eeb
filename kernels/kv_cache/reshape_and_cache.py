"""Writing keys and values of new tokens into a paged cache (Kwon et al., "PagedAttention", 2023).

The cache is NHD: [blocks, block_size, heads, head size] for keys and for values, usually two views of one allocation;
any strides are taken as long as a head is contiguous. MLA's single latent has its own operation, reshape_and_cache_mla.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.kv_cache.slots import check_slots, random_writes, store
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

NAME = "reshape_and_cache"


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """key [T, H, D], value [T, H, Dv]; key_cache [blocks, block_size, H, D] and value_cache [..., H, Dv], written in place.

    Token t goes to slot slot_mapping[t] (int64): place slot % block_size of block slot // block_size; −1 = not written.
    """
    check_slots(NAME, slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    store(key, key_cache, slot_mapping)
    store(value, value_cache, slot_mapping)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random tokens for distinct slots of a cache with room for twice as many; about one in five is not written."""
    t, h, d, dv, size = problem.integers("t", "h", "d", "dv", "block_size")
    return random_writes(Draw(problem, seed, device), t, size, (h, d), (h, dv))


def cost(problem: Problem) -> Cost:
    """Every token read once and written once."""
    t, row = problem.integer("t"), problem.integer("h") * (problem.integer("d") + problem.integer("dv"))
    return Cost(bytes=t * (2 * row * ITEM_BYTES[problem.text("x")] + 8), flops=0)


OP = Op(
    name=NAME,
    family="kv_cache",
    summary="keys and values of new tokens into a paged cache",
    axes=(
        Axis("t", "int", "tokens", dynamic=True),
        Axis("h", "int", "key and value heads", minimum=1),
        Axis("d", "int", "elements of a key head", minimum=1),
        Axis("dv", "int", "elements of a value head", minimum=1),
        Axis("block_size", "int", "tokens of a block", default=16, minimum=1),
        Axis("x", "dtype", "dtype of tokens and cache", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("key", "t h d", strides=VECTORS),
        Tensor("value", "t h dv", strides=VECTORS),
        Tensor("key_cache", "blocks block_size h d", strides=VECTORS, mutable=True),
        Tensor("value_cache", "blocks block_size h dv", strides=VECTORS, mutable=True),
        Tensor("slot_mapping", "t", dtype="int64"),
    ),
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=lambda problem: Tolerance("exact", 0.0),
    bucket="t",
    examples=problems(
        """
        t=0,h=2,d=8,dv=8,x=fp32  t=1,h=1,d=1,dv=1,block_size=1,x=fp32  t=7,h=3,d=33,dv=17
        t=33,h=2,d=64,dv=64,block_size=5,x=fp16  t=65,h=8,d=128,dv=128,x=bf16
        """
    ),
    bench=("t=1,h=8,d=128,dv=128", "t=64,h=8,d=128,dv=128", "t=4096,h=8,d=128,dv=128"),
)
