"""Processing logits in Triton: one program per row and `PART` columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.sampling import process_logits

if TYPE_CHECKING:
    from gristmill.kernels.calls import ProcessLogitsCall


def config(problem: Problem, target: Target) -> Config:
    """1,024 columns at a time: eight of each of 128 threads."""
    return {"block": 1024, "warps": 4}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """From four to sixteen columns per thread."""
    return [{"block": block, "warps": warps} for block in (1024, 2048) for warps in (2, 4, 8)]


# Sizes that differ from step to step: without this, Triton would compile again for 1 and for multiples of 16.
@jit(
    do_not_specialize=[
        "m",
        "rows",
        "fed_rows",
        "stride",
        "seen_slots",
        "bias_slots",
        "more",
        "pairs",
        "masks",
    ]
)  # type: ignore[call-arg, untyped-decorator]
def process_logits_kernel(  # type: ignore[no-untyped-def]
    logits,
    places,
    fed,
    slots,
    penalties,
    seen,
    bias,
    counted,
    barred,
    mask,
    mask_rows,
    out,
    largest,
    m,
    v,
    rows,
    fed_rows,
    stride,
    seen_slots,
    bias_slots,
    more,
    pairs,
    masks,
    words,
    parts,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + row)
    is_there = (place >= 0) & (place < rows)
    token = tl.load(fed + place, mask=is_there & (place < fed_rows), other=-1)
    slot = tl.load(slots + row).to(tl.int64)
    grammar = tl.load(mask_rows + row).to(tl.int64)
    repetition = tl.load(penalties + row)
    frequency = tl.load(penalties + m + row)
    presence = tl.load(penalties + 2 * m + row)
    most_before, most_after = -float("inf"), -float("inf")
    for start in range(0, PART, BLOCK):
        columns = part * PART + start + tl.arange(0, BLOCK)
        inside = columns < v
        in_row = inside & (columns * 0 + place >= 0) & (columns * 0 + place < rows)
        x = tl.load(logits + place * stride + columns, mask=in_row, other=-float("inf")).to(tl.float32)
        most_before = tl.maximum(most_before, tl.max(tl.where(x != x, float("inf"), x), 0))
        has_slot = inside & (columns * 0 + slot >= 0)
        if bias_slots > 0:
            has_bias = has_slot & (columns * 0 + slot < bias_slots)
            x += tl.load(bias + slot * v + columns, mask=has_bias, other=0.0)
        if seen_slots > 0:
            has_state = has_slot & (columns * 0 + slot < seen_slots)
            state = tl.load(seen + slot * v + columns, mask=has_state, other=0)
            count = state >> 1
            for i in range(more):
                other = tl.load(counted + row * more + i).to(tl.int64)
                other = tl.where(other == -2, token, other)
                count += (columns == other).to(tl.int32)
            output = count > 0
            repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where(output | ((state & 1) != 0), repeated, x)
            x -= frequency * count.to(tl.float32)
            x -= tl.where(output, presence, 0.0)
        for i in range(pairs):
            after = tl.load(barred + (row * pairs + i) * 2).to(tl.int64)
            banned = tl.load(barred + (row * pairs + i) * 2 + 1)
            holds = (after == -1) | (after == token)
            x = tl.where((columns == banned) & holds, -float("inf"), x)
        if masks > 0:
            has_grammar = inside & (columns * 0 + grammar >= 0) & (columns * 0 + grammar < masks)
            word = tl.load(mask + grammar * words + columns // 32, mask=has_grammar, other=-1)
            x = tl.where(((word >> (columns % 32)) & 1) == 0, -float("inf"), x)
        most_after = tl.maximum(most_after, tl.max(tl.where((x != x) & inside, float("inf"), x), 0))
        tl.store(out + row.to(tl.int64) * v + columns, x, mask=inside)
    tl.store(largest + row * parts + part, most_before)
    tl.store(largest + (m + row) * parts + part, most_after)


def launch(config: Config, call: ProcessLogitsCall) -> None:
    """The arguments of `process_logits.reference`. One launch, none without rows."""
    m, v = call.out.shape
    parts = cdiv(v, process_logits.PART)
    if m:
        process_logits_kernel[(m, parts)](
            call.logits,
            call.places,
            call.fed,
            call.slots,
            call.penalties,
            call.seen,
            call.bias,
            call.counted,
            call.barred,
            call.mask,
            call.mask_rows,
            call.out,
            call.largest,
            m,
            v,
            call.logits.shape[0],
            call.fed.shape[0],
            call.logits.stride(0),
            call.seen.shape[0],
            call.bias.shape[0],
            call.counted.shape[1],
            call.barred.shape[1],
            call.mask.shape[0],
            call.mask.shape[1],
            parts,
            PART=process_logits.PART,
            BLOCK=config["block"],
            num_warps=config["warps"],
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: logits in bf16 and float32."""
    types = dict.fromkeys(("places", "fed"), "*i64")
    types |= dict.fromkeys(("slots", "seen", "counted", "barred", "mask", "mask_rows"), "*i32")
    types |= dict.fromkeys(("penalties", "bias", "out", "largest"), "*fp32")
    sizes = (
        "m",
        "v",
        "rows",
        "fed_rows",
        "stride",
        "seen_slots",
        "bias_slots",
        "more",
        "pairs",
        "masks",
        "words",
        "parts",
    )
    types |= dict.fromkeys(sizes, "i32")
    constants = {"PART": process_logits.PART, "BLOCK": 1024}
    return [
        AotCase(name, process_logits_kernel, types | {"logits": f"*{name}"}, constants, {"num_warps": 4})
        for name in ("bf16", "fp32")
    ]


KERNEL = Kernel(
    op="process_logits",
    name="process_logits_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row and 8,192 columns, all steps in registers",
    config=config,
    space=space,
    batch_invariant=True,
    priority=50,
)
