"""Merging partial attentions in Triton: one program per tile of rows, a row being one head of one token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import MergeAttentionStatesCall


def config(problem: Problem, target: Target) -> Config:
    """Tiles of about 1,024 elements: as many rows (a token's head) as fit."""
    block = next_power_of_2(problem.integer("d"))
    return {"rows": max(1, 1024 // block), "warps": 4}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles of 512 to 4,096 elements."""
    block = next_power_of_2(problem.integer("d"))
    return [
        {"rows": rows, "warps": warps}
        for rows in sorted({max(1, size // block) for size in (512, 1024, 2048, 4096)})
        for warps in (2, 4, 8)
    ]


@jit
def merge_attention_states_kernel(
    a, a_lse, b, b_lse, out, lse, count, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < count
    left = tl.load(a_lse + row, mask=valid, other=float("-inf"))
    right = tl.load(b_lse + row, mask=valid, other=float("-inf"))
    m_i = tl.maximum(left, right)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    left_weight, right_weight = tl.exp(left - m_i), tl.exp(right - m_i)
    l_i = left_weight + right_weight
    tl.store(lse + row, m_i + tl.log(l_i), mask=valid)
    column = tl.arange(0, BLOCK)[None, :]
    place = row[:, None] * D + column
    inside = valid[:, None] & (column < D)
    # An empty partial (lse -inf) is not read at all: it may hold anything.
    x = tl.load(a + place, mask=inside & (left != float("-inf"))[:, None], other=0.0).to(tl.float32)
    y = tl.load(b + place, mask=inside & (right != float("-inf"))[:, None], other=0.0).to(tl.float32)
    merged = (x * left_weight[:, None] + y * right_weight[:, None]) / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, call: MergeAttentionStatesCall) -> None:
    """a, b [T, H, D] with a_lse, b_lse [T, H] -> out [T, H, D], lse [T, H]."""
    tokens, heads, d = call.a.shape
    count, rows = tokens * heads, int(config["rows"])
    if count:
        merge_attention_states_kernel[(cdiv(count, rows),)](
            call.a,
            call.a_lse,
            call.b,
            call.b_lse,
            call.out,
            call.lse,
            count,
            D=d,
            BLOCK=next_power_of_2(d),
            ROWS=rows,
            num_warps=config["warps"],
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: heads of 128 in bf16."""
    signature = {
        "a": "*bf16",
        "a_lse": "*fp32",
        "b": "*bf16",
        "b_lse": "*fp32",
        "out": "*bf16",
        "lse": "*fp32",
        "count": "i32",
    }
    return [
        AotCase(
            "d128",
            merge_attention_states_kernel,
            signature,
            {"D": 128, "BLOCK": 128, "ROWS": 8},
            {"num_warps": 4},
        )
    ]


KERNEL = Kernel(
    op="merge_attention_states",
    name="merge_attention_states_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per tile of rows, float32 inside",
    config=config,
    space=space,
    batch_invariant=True,
    priority=50,
)
