"""Writing keys and values of new tokens into a paged cache (Kwon et al., "PagedAttention", 2023).

The cache is NHD: [blocks, block_size, heads, head size] for keys and for values, usually two views of one allocation;
any strides are taken as long as a head is contiguous. What goes into a cache of e4m3 codes is quantized (`quantized`).
MLA's single latent has its own operation, reshape_and_cache_mla.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.kv_cache import quantized
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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """key [T, H, D], value [T, H, Dv]; key_cache [blocks, block_size, H, D] and value_cache [..., H, Dv], written in place.

    Token t goes to slot slot_mapping[t] (int64): place slot % block_size of block slot // block_size; −1 = not written.

    k_scale, v_scale: None for caches of the tokens' dtype. Caches of e4m3 codes have float32 scales: [1, 1, 1] (per tensor) and
    [1, 1, H] (per head) are given; [blocks, block_size, H] (per token and head) are written with the codes, as
    max(amax, 1e-10) / 448. Codes are value / scale rounded to nearest even, saturated at ±448; NaN becomes 0x7F.
    """
    check_slots(NAME, slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    for tokens, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        if scale is None:
            store(tokens, cache, slot_mapping)
        elif quantized.by_token(scale):
            own = quantized.token_scales(tokens)
            store(quantized.quantize(tokens, own), cache, slot_mapping)
            store(own, scale, slot_mapping)
        else:
            store(quantized.quantize(tokens, scale[0]), cache, slot_mapping)


def scales_fit(
    kv: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    blocks: int,
    block_size: int,
    h: int,
) -> str | None:
    """The scales go with the caches."""
    return quantized.scales_fit(kv, k_scale, v_scale, blocks, block_size, h)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random tokens for distinct slots of a cache with room for twice as many; about one in five is not written."""
    t, h, d, dv, size = problem.integers("t", "h", "d", "dv", "block_size")
    draw = Draw(problem, seed, device)
    key, value, key_cache, value_cache, slots = random_writes(draw, t, size, (h, d), (h, dv))
    *caches, k_scale, v_scale = quantized.stored(draw, key_cache, value_cache)
    return [key, value, *caches, slots, k_scale, v_scale]


def cost(problem: Problem) -> Cost:
    """Every token read once and written once."""
    t, h, d, dv = problem.integers("t", "h", "d", "dv")
    read = (d + dv) * ITEM_BYTES[problem.text("x")]
    wrote = quantized.row_bytes(problem, d) + quantized.row_bytes(problem, dv)
    return Cost(bytes=t * (h * (read + wrote) + 8), flops=0)


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
        Axis("x", "dtype", "dtype of the tokens", default="bf16", choices=FLOATS),
        *quantized.AXES,
    ),
    arguments=(
        Tensor("key", "t h d", strides=VECTORS),
        Tensor("value", "t h dv", strides=VECTORS),
        Tensor("key_cache", "blocks block_size h d", dtype="kv", strides=VECTORS, mutable=True),
        Tensor("value_cache", "blocks block_size h dv", dtype="kv", strides=VECTORS, mutable=True),
        Tensor("slot_mapping", "t", dtype="int64"),
        *quantized.scale_arguments(mutable=True),
    ),
    values=quantized.VALUES,
    rules=(scales_fit,),
    check=quantized.misfit,
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=lambda problem: Tolerance("exact", 0.0),
    bucket="t",
    examples=problems(
        """
        t=0,h=2,d=8,dv=8,x=fp32  t=1,h=1,d=1,dv=1,block_size=1,x=fp32  t=7,h=3,d=33,dv=17
        t=33,h=2,d=64,dv=64,block_size=5,x=fp16  t=65,h=8,d=128,dv=128,x=bf16
        t=7,h=3,d=33,dv=17,kv=fp8,kv_scale=head  t=33,h=2,d=64,dv=64,block_size=5,x=fp16,kv=fp8,kv_scale=token
        t=9,h=3,d=130,dv=7,x=fp32,kv=fp8,kv_scale=token  t=65,h=8,d=128,dv=128,kv=fp8,kv_scale=head
        """
    ),
    bench=(
        "t=1,h=8,d=128,dv=128",
        "t=64,h=8,d=128,dv=128",
        "t=4096,h=8,d=128,dv=128",
        "t=64,h=8,d=128,dv=128,kv=fp8,kv_scale=head",
    ),
)
