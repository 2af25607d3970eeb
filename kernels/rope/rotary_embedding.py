"""Rotary position embedding of queries and keys, in place (Su et al., "RoFormer", 2021).

Pair i of a head, (a, b), turns by the angle of its position: (a·cos − b·sin, b·cos + a·sin). Pairs are the two halves of
the rotated part (GPT-NeoX, Llama) or its neighbours (GPT-J, DeepSeek). Only the first rot elements of a head turn
(partial rotary); a model that rotates another slice, as DeepSeek does, passes that slice as a strided view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Scalar, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

ROT = Axis("rot", "int", "elements of a head that are rotated, its first ones", minimum=2)
STYLE = Axis(
    "style", "choice", "pairs: halves (neox) or neighbours (gptj)", default="neox", choices=("neox", "gptj")
)
VALUES = {"style": "'gptj' if interleaved else 'neox'"}
TABLE_ROWS = 4096
"""Positions in the table of generated arguments."""


def reference(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """q [T, Hq, D] and k [T, Hk, D] (or None), written in place; positions int64 [T]; cos_sin float32 [P, rot].

    Row p of cos_sin holds the cosines, then the sines, of position p (see `gristmill.kernels.rope.cache`). Computed in
    float32, rounded once. The rotated part of a token whose position is not in [0, P) becomes NaN.
    """
    import torch

    rows, rot = cos_sin.shape
    known = (positions >= 0) & (positions < rows)
    table = torch.where(known[:, None], cos_sin[positions.clamp(0, rows - 1)], torch.nan)[:, None, :]
    cos, sin = table[..., : rot // 2], table[..., rot // 2 :]
    first, second = pairs(rot, interleaved)
    for x in (q, k):
        if x is not None:
            part = x[..., :rot]
            a, b = part[..., first].float(), part[..., second].float()
            # Both before either is written: a and b may be views of x.
            turned = a * cos - b * sin, b * cos + a * sin
            part[..., first], part[..., second] = (value.to(x.dtype) for value in turned)


def pairs(rot: int, interleaved: bool) -> tuple[slice, slice]:
    """Where the first and the second elements of the pairs are in the rotated part of a head."""
    if interleaved:
        return slice(0, rot, 2), slice(1, rot, 2)
    return slice(0, rot // 2), slice(rot // 2, rot)


def table_has_rows(positions: int) -> str | None:
    """cos_sin has a row to clamp other positions to."""
    return None if positions else "cos_sin must have a row for at least one position, got none"


def check(problem: Problem) -> str | None:
    """What keeps the axes of `problem` from going together."""
    return misfit(*problem.integers("rot", "d"))


def misfit(rot: int, size: int) -> str | None:
    """Why heads of `size` elements do not have `rot` that are rotated; None if they do."""
    if rot % 2 == 0 and 2 <= rot <= size:
        return None
    return f"rot must be even, at least 2 and at most the head size {size}, got {rot}"


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments; the positions include the first and the last of the table."""
    import torch

    from gristmill.kernels.rope.cache import RopeParameters, rope_cache

    draw, (t, hq, hk, d, rot) = Draw(problem, seed, device), problem.integers("t", "hq", "hk", "d", "rot")
    q, k = draw.stored(draw.normal(t, hq, d), draw.normal(t, hk, d))
    positions = torch.randint(0, TABLE_ROWS, (t,), generator=draw.generator)
    positions[:2] = torch.tensor([TABLE_ROWS - 1, 0])[:t]
    table = rope_cache(rot, TABLE_ROWS, RopeParameters())
    return [q, k if hk else None, positions.to(device), table.to(device), problem.text("style") == "gptj"]


def cost(problem: Problem) -> Cost:
    """The rotated part read and written once, a row of the table and a position read for each token."""
    t, heads = problem.integer("t"), problem.integer("hq") + problem.integer("hk")
    rot, item = problem.integer("rot"), ITEM_BYTES[problem.text("x")]
    return Cost(bytes=t * (2 * heads * rot * item + rot * 4 + 8), flops=3 * t * heads * rot, unit="fp32")


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """Largest |Δ| of a rotated element / length of its pair; infinite if an element past the rotated part changed."""
    worst = 0.0
    for out, ref in zip(outputs, references, strict=True):
        if not out[..., problem.integer("rot") :].equal(ref[..., problem.integer("rot") :]):
            return math.inf
        worst = max(worst, distance(problem, ref, out.double() - ref.double()))
    return worst


def distance(problem: Problem, ref: torch.Tensor, delta: torch.Tensor) -> float:
    """Largest |delta| relative to heads `ref` [..., D]: to the length of the pair of a rotated element, to the element past them."""
    if not delta.numel():
        return 0.0
    first, second = pairs(problem.integer("rot"), problem.text("style") == "gptj")
    size = ref.double().abs()
    length = (size[..., first].square() + size[..., second].square()).sqrt()
    size[..., first] = size[..., second] = length
    return float((delta.abs() / size.clamp_min(1e-30)).nan_to_num(0.0).max())


OP = Op(
    name="rotary_embedding",
    family="rope",
    summary="rotary position embedding of q and k, in place",
    axes=(
        Axis("t", "int", "tokens", dynamic=True),
        Axis("hq", "int", "heads of q", minimum=1),
        Axis("hk", "int", "heads of k; 0 = only q is rotated", default=0),
        Axis("d", "int", "elements of a head", minimum=2),
        ROT,
        STYLE,
        Axis("x", "dtype", "dtype of q and k", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("q", "t hq d", strides=VECTORS, mutable=True),
        Tensor("k", "t hk d", strides=VECTORS, mutable=True, optional=True, required=True),
        Tensor("positions", "t", dtype="int64"),
        Tensor("cos_sin", "positions rot", dtype="fp32"),
        Scalar("interleaved", "bool", False),
    ),
    values=VALUES,
    rules=(table_has_rows,),
    reference=reference,
    inputs=inputs,
    check=check,
    cost=cost,
    # One rounding step of the dtype, of the length of the pair (a rotation keeps it).
    tolerance=Tolerance.by_dtype("pairs", fp32=4e-7, fp16=1.1e-3, bf16=8.5e-3),
    error=error,
    bucket="t",
    examples=problems(
        """
        t=0,hq=2,hk=1,d=16,rot=16,x=fp32  t=1,hq=1,hk=0,d=2,rot=2,x=fp32
        t=7,hq=3,hk=1,d=80,rot=22,style=gptj  t=33,hq=5,hk=2,d=64,rot=64,x=fp16
        t=5,hq=16,hk=1,d=128,rot=128  t=9,hq=3,hk=1,d=64,rot=64,style=gptj,x=fp32
        t=257,hq=2,hk=2,d=96,rot=96,x=fp32  t=3,hq=2,hk=1,d=96,rot=24
        """
    ),
    bench=problems(
        """
        t=1,hq=32,hk=8,d=128,rot=128  t=64,hq=32,hk=8,d=128,rot=128  t=4096,hq=32,hk=8,d=128,rot=128
        t=4096,hq=128,hk=1,d=64,rot=64,style=gptj
        """
    ),
)
