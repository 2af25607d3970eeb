"""What attention does between its projection and its scores, in one pass over the packed projection: RMSNorm of the heads of q and
k (optional), rotary embedding of both, and the write of keys and values into the paged cache.

The composition of rms_norm, rotary_embedding and reshape_and_cache, with their roundings: a normalized head is rounded to the
dtype before it is rotated, and a rotated key before it is quantized. Others fuse parts of it: vLLM the norms with the rotation
(`fused_qk_norm_rope`), FlashInfer the rotation with a quantized write (`rope_quantize_fp8_append_paged_kv_cache`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import VECTORS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.kv_cache import quantized, reshape_and_cache
from gristmill.kernels.kv_cache.rotated_keys import error, rotated
from gristmill.kernels.kv_cache.slots import check_slots, random_writes
from gristmill.kernels.norm import rms_norm
from gristmill.kernels.random_inputs import Draw
from gristmill.kernels.rope import rotary_embedding

if TYPE_CHECKING:
    import torch

NAME = "qk_norm_rope_cache"


def reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """qkv [T, Hq + 2 Hk, D], the heads of q, then of k, then of v, of each token -> q [T, Hq, D], normalized and rotated.

    q_weight, k_weight: [D] in x's dtype or float32, RMSNorm of each head with eps; None: no norm. positions int64 [T] and
    cos_sin float32 [P, rot]: the first rot elements of a head are rotated, as in `rotary_embedding`. Keys and values of token t go
    to slot slot_mapping[t] of key_cache and value_cache [blocks, block_size, Hk, D], as in `reshape_and_cache`; −1 = not written.
    k_scale, v_scale: of caches of e4m3 codes, per tensor, per head, or per token and head (written).
    """
    check_slots(NAME, slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    q, k, v = rotated(qkv, q_weight, k_weight, eps, positions, cos_sin, interleaved, key_cache.shape[2])
    reshape_and_cache.reference(k, v, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    return q


def norms_fit(q_weight: torch.Tensor | None, k_weight: torch.Tensor | None) -> str | None:
    """q and k are both normalized, or neither."""
    return (
        None if (q_weight is None) == (k_weight is None) else "q_weight and k_weight must be given together"
    )


def check(problem: Problem) -> str | None:
    """Why the axes of `problem` are inconsistent; None if they are not."""
    wrong = rotary_embedding.misfit(*problem.integers("rot", "head_dim")) or quantized.misfit(problem)
    if not problem["norm"] and problem["w"] != "x":
        return "without norms there are no weights, and w is x"
    return wrong or rms_norm.check(problem)


def inputs(problem: Problem, seed: int, device: str) -> list[object]:
    """Random tokens for distinct slots of a cache with room for twice as many; about one in five is not written. The positions
    include the first and the last of the table."""
    import torch

    from gristmill.kernels.rope.cache import RopeParameters, rope_cache

    t, hq, hk, d, rot, size = problem.integers("t", "heads", "kv_heads", "head_dim", "rot", "block_size")
    draw, rows = Draw(problem, seed, device), rotary_embedding.TABLE_ROWS
    key, value, key_cache, value_cache, slots = random_writes(draw, t, size, (hk, d), (hk, d))
    *caches, k_scale, v_scale = quantized.stored(draw, key_cache, value_cache)
    (q,) = draw.stored(draw.rows(t, hq, d))
    weights = [rms_norm.stored_weight(problem, draw, 1 + 0.2 * draw.normal(d)) for _ in "qk"]
    positions = torch.randint(0, rows, (t,), generator=draw.generator)
    positions[:2] = torch.tensor([rows - 1, 0])[:t]
    return [
        torch.cat((q, key, value), 1),
        *(weights if problem["norm"] else (None, None)),
        1e-5,
        positions.to(device),
        rope_cache(rot, rows, RopeParameters()).to(device),
        *caches,
        slots,
        problem.text("style") == "gptj",
        k_scale,
        v_scale,
    ]


def cost(problem: Problem) -> Cost:
    """The projection, a row of the table, a position and a slot read per token; q, and keys and values in the cache, written."""
    t, hq, hk, d, rot = problem.integers("t", "heads", "kv_heads", "head_dim", "rot")
    item = ITEM_BYTES[problem.text("x")]
    read = (hq + 2 * hk) * d * item + 4 * rot + 16
    wrote = hq * d * item + 2 * hk * quantized.row_bytes(problem, d)
    flops = (hq + hk) * (3 * rot + (4 * d if problem["norm"] else 0))
    return Cost(bytes=t * (read + wrote), flops=t * flops, unit="fp32")


def tolerance(problem: Problem) -> Tolerance:
    """One rounding of the dtype for the rotation, and with a norm one more, which the rotation passes on."""
    limits = {"fp32": 4e-7, "fp16": 1.1e-3, "bf16": 8.5e-3}
    limit = limits[problem.text("x")]
    return Tolerance("pairs", limit + (rms_norm.OP.tolerance(problem).limit if problem["norm"] else 0))


OP = Op(
    name=NAME,
    family="kv_cache",
    summary="RMSNorm of the heads of q and k, rotary embedding, and the write into a paged cache, of a packed qkv",
    axes=(
        Axis("t", "int", "tokens", dynamic=True),
        Axis("heads", "int", "query heads", minimum=1),
        Axis("kv_heads", "int", "key and value heads", minimum=1),
        Axis("head_dim", "int", "elements of a head", minimum=2),
        rotary_embedding.ROT,
        rotary_embedding.STYLE,
        Axis("norm", "bool", "whether heads of q and k are normalized", default=False),
        Axis("block_size", "int", "tokens of a block", default=16, minimum=1),
        Axis("x", "dtype", "dtype of the projection and q", default="bf16", choices=FLOATS),
        replace(rms_norm.WEIGHT, help="dtype of the weights of norms; x: that of x"),
        *quantized.AXES,
    ),
    arguments=(
        Tensor("qkv", "t heads+2*kv_heads head_dim", strides=VECTORS),
        Tensor("q_weight", "head_dim", dtype="w", optional=True, required=True),
        Tensor("k_weight", "head_dim", dtype="w", optional=True, required=True),
        Scalar("eps", "float", minimum=0),
        Tensor("positions", "t", dtype="int64"),
        Tensor("cos_sin", "positions rot", dtype="fp32"),
        Tensor("key_cache", "blocks block_size kv_heads head_dim", dtype="kv", strides=VECTORS, mutable=True),
        Tensor(
            "value_cache", "blocks block_size kv_heads head_dim", dtype="kv", strides=VECTORS, mutable=True
        ),
        Tensor("slot_mapping", "t", dtype="int64"),
        Scalar("interleaved", "bool", False),
        *quantized.scale_arguments(mutable=True),
    ),
    returns=(Tensor("q", "t heads head_dim"),),
    values={
        **rotary_embedding.VALUES,
        **quantized.VALUES,
        "norm": "q_weight is not None",
    },
    rules=(rotary_embedding.table_has_rows, norms_fit, quantized.scales_fit),
    check=check,
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=tolerance,
    error=error,
    bucket="t",
    examples=problems(
        """
        t=0,heads=2,kv_heads=1,head_dim=16,rot=16,x=fp32  t=1,heads=1,kv_heads=1,head_dim=2,rot=2,block_size=1,x=fp32
        t=7,heads=3,kv_heads=3,head_dim=80,rot=22,style=gptj,norm=true
        t=33,heads=6,kv_heads=2,head_dim=64,rot=64,block_size=5,x=fp16
        t=65,heads=8,kv_heads=2,head_dim=128,rot=128,norm=true
        t=9,heads=3,kv_heads=1,head_dim=192,rot=64,style=gptj,x=fp32
        t=257,heads=2,kv_heads=1,head_dim=96,rot=24,norm=true,x=fp32
        t=7,heads=4,kv_heads=2,head_dim=33,rot=30,norm=true,kv=fp8,kv_scale=head
        t=33,heads=5,kv_heads=5,head_dim=64,rot=64,block_size=5,x=fp16,kv=fp8,kv_scale=token
        t=9,heads=2,kv_heads=1,head_dim=130,rot=128,style=gptj,norm=true,x=fp32,kv=fp8,kv_scale=token
        t=7,heads=4,kv_heads=1,head_dim=256,rot=256,norm=true,w=fp32
        t=9,heads=3,kv_heads=2,head_dim=33,rot=30,norm=true,x=fp16,w=fp32,kv=fp8,kv_scale=token
        """
    ),
    bench=problems(
        """
        t=1,heads=32,kv_heads=8,head_dim=128,rot=128  t=1,heads=16,kv_heads=8,head_dim=128,rot=128,norm=true
        t=64,heads=32,kv_heads=8,head_dim=128,rot=128,norm=true
        t=4096,heads=32,kv_heads=8,head_dim=128,rot=128,norm=true
        t=64,heads=32,kv_heads=8,head_dim=128,rot=128,norm=true,kv=fp8,kv_scale=head
        """
    ),
)
