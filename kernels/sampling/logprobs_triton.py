"""Log-probabilities in Triton: one program per row and `PART` columns, and one per row that joins its parts.

A part leaves its largest logit, the sum of its weights relative to that, how many of its tokens are likelier than the row's, and its most
likely tokens. Parts do not depend on the batch and are joined in their order, so neither do the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv, next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import jit, tl
from gristmill.kernels.sampling.logprobs import PART

if TYPE_CHECKING:
    from gristmill.kernels.calls import LogprobsCall

MOST = 64
"""The most likely tokens of a row that are found one after another."""
PARTS = 1024
"""The most parts of a row, which one program holds."""
ALIGNMENT = 256


def accepts(problem: Problem) -> str | None:
    """Few of the most likely tokens, and vocabularies whose parts one program holds."""
    v, k = problem.integers("v", "k")
    if k > MOST:
        return f"up to {MOST} of the most likely tokens, got {k}"
    return None if v <= PARTS * PART else f"vocabularies of up to {PARTS * PART} tokens, got {v}"


def config(problem: Problem, target: Target) -> Config:
    """32 columns of each of 256 threads."""
    return {"warps": 8}


def workspace(problem: Problem, config: Config) -> Workspace:
    """Four numbers for each part, and its most likely tokens with their logits."""
    m, v, k = problem.integers("m", "v", "k")
    return Workspace(8 * m * cdiv(v, PART) * (2 + k))


@jit(do_not_specialize=["rows", "id_rows", "stride"])  # type: ignore[call-arg, untyped-decorator]
def logprobs_parts_kernel(  # type: ignore[no-untyped-def]
    logits, places, ids, floats, integers, v, k, rows, id_rows, stride, parts, PART: tl.constexpr
):
    """floats, integers [rows read, parts, 2 + k]: the largest logit, the sum of weights, logits; likelier tokens, invalid logits, tokens."""
    row, part = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + row)
    is_there = (place >= 0) & (place < rows)
    token = tl.load(ids + place, mask=is_there & (place < id_rows), other=-1)
    source = logits + place * stride
    has_token = is_there & (token >= 0) & (token < v)
    chosen = tl.load(source + token, mask=has_token, other=float("nan")).to(tl.float32)
    columns = part * PART + tl.arange(0, PART)
    inside = columns < v
    in_row = inside & (columns * 0 + place >= 0) & (columns * 0 + place < rows)
    x = tl.load(source + columns, mask=in_row, other=-float("inf")).to(tl.float32)
    invalid = tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    x = tl.where(x != x, -float("inf"), x)
    peak = tl.max(x, 0)
    weights = tl.exp(x - tl.where(tl.abs(peak) == float("inf"), 0.0, peak))
    base = (row.to(tl.int64) * parts + part) * (2 + k)
    tl.store(floats + base, peak)
    tl.store(floats + base + 1, tl.sum(weights, 0))
    tl.store(integers + base, tl.sum((x > chosen).to(tl.int32), 0))
    tl.store(integers + base + 1, invalid)
    # Tokens in order: of equal ones the lower id first.
    last, last_id = float("inf"), -1
    for i in range(k):
        left = inside & ((x < last) | ((x == last) & (columns > last_id)))
        last = tl.max(tl.where(left, x, -float("inf")), 0)
        last_id = tl.min(tl.where(left & (x == last), columns, 2147483647), 0)
        tl.store(floats + base + 2 + i, last)
        tl.store(integers + base + 2 + i, last_id)


@jit(do_not_specialize=["rows", "id_rows", "stride"])  # type: ignore[call-arg, untyped-decorator]
def logprobs_join_kernel(  # type: ignore[no-untyped-def]
    logits,
    places,
    ids,
    floats,
    integers,
    values,
    tokens,
    v,
    k,
    rows,
    id_rows,
    stride,
    parts,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    is_there = (place >= 0) & (place < rows)
    token = tl.load(ids + place, mask=is_there & (place < id_rows), other=-1)
    has_token = is_there & (token >= 0) & (token < v)
    chosen = tl.load(logits + place * stride + token, mask=has_token, other=float("nan")).to(tl.float32)
    part = tl.arange(0, BLOCK)
    base = (row * parts + part) * (2 + k)
    peaks = tl.load(floats + base, mask=part < parts, other=-float("inf"))
    sums = tl.load(floats + base + 1, mask=part < parts, other=0.0)
    likelier = tl.sum(tl.load(integers + base, mask=part < parts, other=0), 0)
    invalid = tl.sum(tl.load(integers + base + 1, mask=part < parts, other=0), 0)
    peak = tl.max(peaks, 0)
    broken = (invalid > 0) | (peak == -float("inf"))
    nan = float("nan")
    safe = tl.where(broken, 0.0, peak)
    total = tl.sum(sums * tl.exp(peaks - safe), 0)
    log_sum = tl.log(tl.where(broken, 1.0, total))
    out = row * (1 + k)
    tl.store(values + out, tl.where(broken, nan, chosen) - safe - log_sum)
    tl.store(tokens + out, tl.where(broken, 0, likelier))
    place_in_part = tl.arange(0, MOST)
    candidate = base[:, None] + 2 + place_in_part[None, :]
    is_candidate = (part[:, None] < parts) & (place_in_part[None, :] < k)
    x = tl.load(floats + candidate, mask=is_candidate, other=-float("inf"))
    names = tl.load(integers + candidate, mask=is_candidate, other=2147483647)
    last, last_id = float("inf"), -1
    for i in range(k):
        left = (names < v) & ((x < last) | ((x == last) & (names > last_id)))
        last = tl.max(tl.max(tl.where(left, x, -float("inf")), 1), 0)
        last_id = tl.min(tl.min(tl.where(left & (x == last), names, 2147483647), 1), 0)
        tl.store(values + out + 1 + i, tl.where(broken, nan, last) - safe - log_sum)
        tl.store(tokens + out + 1 + i, tl.where(broken, 0, last_id))


def launch(config: Config, call: LogprobsCall) -> None:
    """The arguments of `logprobs.reference`. Two launches, none without rows."""
    import torch

    m, k, v = len(call.places), call.k, call.logits.shape[1]
    if not m:
        return
    parts = cdiv(v, PART)
    half = m * parts * (2 + k)
    space = call.workspace
    if space is None:
        space = torch.empty(8 * half, dtype=torch.uint8, device=call.logits.device)
    if space.nbytes < 8 * half or space.device != call.logits.device or not space.is_contiguous():
        raise ValueError(
            f"logprobs: the workspace must be {8 * half} contiguous bytes on {call.logits.device}, got {space.nbytes} on {space.device}"
        )
    flat = space.view(-1).view(torch.uint8)
    floats, integers = flat[: 4 * half].view(torch.float32), flat[4 * half : 8 * half].view(torch.int32)
    source = (call.logits, call.places, call.ids)
    sizes = (v, k, call.logits.shape[0], call.ids.shape[0], call.logits.stride(0), parts)
    logprobs_parts_kernel[(m, parts)](*source, floats, integers, *sizes, PART=PART, num_warps=config["warps"])
    logprobs_join_kernel[(m,)](
        *source,
        floats,
        integers,
        call.logprobs,
        call.tokens,
        *sizes,
        BLOCK=next_power_of_2(parts),
        MOST=next_power_of_2(max(k, 1)),
        num_warps=4,
    )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: logits in bf16 and float32, 20 of the most likely of 152k tokens."""
    types = dict.fromkeys(("places", "ids"), "*i64") | {"floats": "*fp32", "integers": "*i32"}
    types |= dict.fromkeys(("v", "k", "rows", "id_rows", "stride", "parts"), "i32")
    outputs = {"values": "*fp32", "tokens": "*i32"}
    cases = []
    for name in ("bf16", "fp32"):
        given = types | {"logits": f"*{name}"}
        cases += [
            AotCase(f"parts_{name}", logprobs_parts_kernel, given, {"PART": PART}, {"num_warps": 8}),
            AotCase(
                f"join_{name}",
                logprobs_join_kernel,
                given | outputs,
                {"BLOCK": 32, "MOST": 32},
                {"num_warps": 4},
            ),
        ]
    return cases


KERNEL = Kernel(
    op="logprobs",
    name="logprobs_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per row and 8,192 columns, and one per row that joins them",
    accepts=accepts,
    config=config,
    workspace=workspace,
    batch_invariant=True,
    priority=50,
)
