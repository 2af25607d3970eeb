"""Quantized KV caches: what the operations that write and read them have in common.

A cache of axis ``kv`` = ``fp8`` holds e4m3 codes, value = code · scale in float32. Scales are float32 tensors of three
dimensions, one for keys and one for values, of one shape:

========  ==============================  ============================================================================
kv_scale  shape                           meaning
========  ==============================  ============================================================================
head      [1, 1, 1]                       one scale per tensor, given
head      [1, 1, kv_heads]                one scale per head, given
token     [blocks, block_size, kv_heads]  one scale per token and head; the operation that writes the cache writes it
========  ==============================  ============================================================================

Codes are value / scale, an IEEE float32 division, rounded to nearest with ties to even. What is beyond ±448, infinities
too, saturates. NaN becomes 0x7F, e4m3's NaN without a sign, and so remains visible. The scale of a token and head is
max(amax, 1e-10) / 448, the rule of ``fp8_token`` activations; it is NaN or infinite if the row holds a NaN or an infinity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import STRIDED, Tensor
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

AXES = (
    Axis(
        "kv", "dtype", "dtype of the caches; x: the other tensors' dtype", default="x", choices=("x", "fp8")
    ),
    Axis(
        "kv_scale",
        "choice",
        "scales of the caches: none, one per head (or tensor), one per token and head",
        default="none",
        choices=("none", "head", "token"),
    ),
)
VALUES = {"kv_scale": "'none' if k_scale is None else 'token' if scale_blocks * scale_slots > 1 else 'head'"}
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
MIN_AMAX = 1e-10


def scale_arguments(mutable: bool) -> tuple[Tensor, Tensor]:
    """The declarations of k_scale and v_scale; `mutable` if the operation writes scales of tokens."""
    shape = "scale_blocks scale_slots scale_heads"
    k_scale, v_scale = (
        Tensor(name, shape, dtype="fp32", optional=True, mutable=mutable, strides=STRIDED)
        for name in ("k_scale", "v_scale")
    )
    return k_scale, v_scale


def scales_fit(
    kv: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    blocks: int,
    block_size: int,
    kv_heads: int,
) -> str | None:
    """Quantized caches, and no others, have scales, and each applies to the cache as a whole, a head, or a token and head."""
    if k_scale is None and v_scale is None:
        return (
            None
            if kv == "x"
            else f"{kv} caches need k_scale and v_scale, float32 [1, 1, 1] for one per tensor"
        )
    if k_scale is None or v_scale is None:
        return "k_scale and v_scale must be given together"
    if kv == "x":
        return "k_scale and v_scale are for quantized caches, and these are not"
    shape = tuple(k_scale.shape)
    if shape in ((1, 1, 1), (1, 1, kv_heads), (blocks, block_size, kv_heads)):
        return None
    return (
        f"k_scale must be [1, 1, 1], [1, 1, kv_heads] = [1, 1, {kv_heads}] or [blocks, block_size, kv_heads] = "
        f"[{blocks}, {block_size}, {kv_heads}], got {list(shape)}"
    )


def misfit(problem: Problem) -> str | None:
    """Why kv and kv_scale are inconsistent; None if they are not."""
    quantized, scaled = problem.text("kv") != "x", problem.text("kv_scale") != "none"
    if quantized == scaled:
        return None
    return f"kv={problem['kv']} does not go with kv_scale={problem['kv_scale']}: quantized caches, and no others, have scales"


def cache_dtype(problem: Problem) -> str:
    """The name of the dtype of the caches."""
    return problem.text("x") if problem.text("kv") == "x" else problem.text("kv")


def row_bytes(problem: Problem, dim: int) -> int:
    """Bytes of one head of one token in a cache, its scale included."""
    scale = 4 if problem.text("kv_scale") == "token" else 0
    return dim * ITEM_BYTES[cache_dtype(problem)] + scale


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """The same cache as uint8."""
    import torch

    return cache.view(torch.uint8)


def by_token(scale: torch.Tensor) -> bool:
    """Whether there is one scale per token and head; else one per head, or per tensor."""
    return scale.shape[0] * scale.shape[1] > 1


def scale_strides(scale: torch.Tensor | None) -> tuple[int, int, int]:
    """Elements between scales of neighbouring blocks, places and heads: 0 for a shared scale, and without scales."""
    if scale is None:
        return (0, 0, 0)
    block, place, head = (
        0 if size == 1 else step for size, step in zip(scale.shape, scale.stride(), strict=True)
    )
    return block, place, head


def quantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 codes (float8_e4m3fn) of values [..., D] with scale [...], or what broadcasts to it."""
    import torch

    scaled = (values.float() / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(scaled.isnan(), E4M3_NAN).view(torch.float8_e4m3fn)


def token_scales(values: torch.Tensor) -> torch.Tensor:
    """The scales of values [..., D], one per token and head: [...]."""
    import torch

    largest = values.float().abs().amax(-1).clamp_min(MIN_AMAX)
    # A tensor as divisor: on a GPU torch multiplies by the reciprocal of a number, which rounds twice.
    return largest / torch.full_like(largest, E4M3_MAX)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of codes [..., D] with scale [...], or what broadcasts to it."""
    return codes.float() * scale[..., None]


def stored(draw: Draw, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor | None]:
    """Random caches [blocks, block_size, heads, D] as a generated problem holds them: keys, values, k_scale, v_scale.

    Scales are between 2^-8 and 2^-4, so that normal values stay in range, and all differ. Where a row is NaN, the scale of
    its token and head is NaN too.
    """
    kind = draw.problem.text("kv_scale")
    if kind == "none":
        return [keys, values, None, None]
    caches, scales = [], []
    for part in (keys, values):
        shape = part.shape[:3] if kind == "token" else (1, 1, part.shape[2])
        scale = (2 ** (4 * draw.uniform(*shape) - 8)).to(part.device)
        caches.append(quantize(part, scale))
        scales.append(scale.masked_fill(part[..., 0].isnan(), float("nan")) if kind == "token" else scale)
    return [*caches, *scales]
