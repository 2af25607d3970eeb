"""Ragged attention problems: axes, arguments, lengths and checks shared by the attention operations.

A problem holds bounds only (``q_tokens, seqs, max_q, max_ctx, total_ctx``); `lengths` turns them into one query length and one
context length per sequence, by seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Argument, Scalar
from gristmill.kernel_registry.arguments import Tensor as TensorArgument
from gristmill.kernel_registry.op import Cost, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import ITEM_BYTES, need

if TYPE_CHECKING:
    from torch import Tensor

LIMITS = {"fp32": (4e-5, 2e-5), "fp16": (2.5e-3, 2e-4), "bf16": (1.3e-2, 2e-4)}
"""Limits of (outputs, log-sum-exp) by dtype: two roundings of the output; the scores are float32 in every kernel."""
CAPPED = {"bf16": 1.6e-2}
"""Those of outputs whose scores have a soft cap, where they differ: kernels need no maximum of bounded scores, so that a row's largest weight is
no power of two, and is rounded as well, as a probability in bf16 is."""

RAGGED_AXES = (
    Axis("q_tokens", "int", "new tokens of all sequences", dynamic=True),
    Axis("seqs", "int", "sequences", dynamic=True, minimum=1),
    Axis("max_q", "int", "bound on the new tokens of one sequence", dynamic=True, minimum=1),
    Axis(
        "max_ctx",
        "int",
        "bound on the context of one sequence, its new tokens included",
        dynamic=True,
        minimum=1,
    ),
    Axis("total_ctx", "int", "contexts of all sequences together", dynamic=True),
)

PAGES: tuple[Argument, ...] = (
    TensorArgument("block_table", "seqs max_blocks", dtype="int32", strides=VECTORS),
    TensorArgument("query_start", "seqs+1", dtype="int32"),
    TensorArgument("seq_lens", "seqs", dtype="int32"),
)
"""The location and the lengths of the sequences in a paged cache."""

BOUNDS: tuple[Argument, ...] = (
    Scalar("max_q", "int", minimum=1),
    Scalar("max_ctx", "int", minimum=1),
    Scalar("scale", "float"),
)


def misfit(problem: Problem) -> str | None:
    """Why the ragged axes of `problem` and its numbers of heads are inconsistent; None if they are not."""
    values = problem.as_dict()
    heads, kv_heads = values["heads"], values.get("kv_heads", 1)
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        return f"{heads} query heads do not divide among {kv_heads} KV heads"
    if any(values[axis.name] is None for axis in RAGGED_AXES):
        return None
    tokens, seqs, longest_query = (
        problem.integer("q_tokens"),
        problem.integer("seqs"),
        min(problem.integer("max_q"), problem.integer("max_ctx")),
    )
    if tokens > seqs * longest_query:
        return f"{tokens} new tokens do not fit in {seqs} sequences of at most {longest_query}"
    return None


def lengths(problem: Problem, seed: int) -> tuple[list[int], list[int]]:
    """(new tokens, context) of each sequence, within the bounds of `problem`; the contexts include the new tokens.

    One sequence has as many new tokens as the bounds allow, and one with new tokens has the longest context. The others are random: decodes,
    prefills, cached prefixes, and sequences without new tokens where there are fewer tokens than sequences.
    ValueError for bounds that no lengths can meet.
    """
    tokens, seqs = problem.integer("q_tokens"), problem.integer("seqs")
    max_ctx = problem.integer("max_ctx")
    longest_query = min(problem.integer("max_q"), max_ctx)
    wrong = misfit(problem)
    need(wrong is None, f"{problem.op}: {wrong}")
    draw = random.Random(seed)
    queries = [0] * seqs
    queries[0] = min(longest_query, tokens)
    remaining = tokens - queries[0]
    for index in range(1, seqs):
        queries[index] = 1 if remaining > 0 else 0
        remaining -= queries[index]
    while remaining > 0:
        for index in range(seqs):
            extra = min(remaining, draw.randint(0, longest_query - queries[index]))
            queries[index] += extra
            remaining -= extra
    contexts = list(queries)
    spare = max(0, problem.integer("total_ctx") - tokens)
    order = list(range(seqs))
    draw.shuffle(order)
    longest = draw.choice([index for index in order if queries[index]] or order)
    order.sort(key=lambda index: index != longest)
    for rank, index in enumerate(order):
        capacity = min(spare, max_ctx - contexts[index])
        extra = capacity if rank == 0 else draw.randint(0, min(capacity, 2 * spare // (seqs - rank)))
        contexts[index] += extra
        spare -= extra
    for index in order:
        extra = min(spare, max_ctx - contexts[index])
        contexts[index] += extra
        spare -= extra
    draw.shuffle(order)
    return [queries[i] for i in order], [contexts[i] for i in order]


def shrunk(problem: Problem) -> Problem:
    """The problem that verifies a plan for `problem`: few tokens, contexts of several blocks, independent of its bounds."""
    tokens = max(1, min(problem.integer("q_tokens"), 67))
    seqs = min(problem.integer("seqs"), 5)
    max_q = min(problem.integer("max_q"), tokens)
    tokens = min(tokens, seqs * max_q)
    max_ctx = max(333, max_q)
    return problem.with_values(
        q_tokens=tokens,
        seqs=seqs,
        max_q=max_q,
        max_ctx=max_ctx,
        total_ctx=max(max_ctx, seqs * max_ctx * 2 // 3),
    )


def visible_keys(problem: Problem, window: int = 0, seed: int = 0, ahead: int = 0) -> tuple[int, int]:
    """(keys that must be read, query-key pairs that count), for the lengths that `lengths` draws. `window` and `ahead` as in
    `causal_attention`."""
    read, pairs = 0, 0
    for query, context in zip(*lengths(problem, seed), strict=True):
        if query == 0:
            continue
        first = context - query
        read += min(context, query + window - 1) if window > 0 else context
        if window <= 0 and ahead == 0:
            pairs += query * first + query * (query + 1) // 2
            continue
        for position in range(first, context):
            end = context if ahead < 0 else min(context, position + 1 + ahead)
            pairs += end - (max(0, position + 1 - window) if window > 0 else 0)
    return read, pairs


def attention_cost(problem: Problem, elements: int, flops: int) -> Cost:
    """The cost of reading or writing `elements` of the dtype of axis x, and the log-sum-exps, if the problem has them."""
    lse_bytes = 4 * problem.integer("q_tokens") * problem.integer("heads") if problem["lse"] else 0
    x = problem.text("x")
    return Cost(bytes=elements * ITEM_BYTES[x] + lse_bytes, flops=flops, unit=x)


def queries_fit(q_tokens: int, seqs: int, max_q: int) -> str | None:
    """The new tokens fit in the sequences."""
    if q_tokens <= seqs * max_q:
        return None
    return f"q has {q_tokens} tokens, more than {seqs} sequences of at most max_q {max_q}"


def contexts_fit(total_ctx: int, seqs: int, max_ctx: int) -> str | None:
    """The keys fit in the sequences."""
    if total_ctx <= seqs * max_ctx:
        return None
    return f"k has {total_ctx} rows, more than {seqs} sequences of at most max_ctx {max_ctx}"


def table_fits(max_ctx: int, max_blocks: int, block_size: int) -> str | None:
    """A row of the block table has the blocks of the longest context."""
    if max_ctx <= max_blocks * block_size:
        return None
    return f"max_ctx {max_ctx} is more than the {max_blocks} blocks of {block_size} per sequence of block_table hold"


def tolerance(problem: Problem) -> Tolerance:
    """The output's rounding and one of the weights; see `error`."""
    return Tolerance("scaled", _limits(problem)[0])


def _limits(problem: Problem) -> tuple[float, float]:
    x = problem.text("x")
    outputs, lse = LIMITS[x]
    return (CAPPED.get(x, outputs) if dict(problem.values).get("softcap") else outputs), lse


def error(
    problem: Problem, arguments: Sequence[Any], outputs: Sequence[Tensor], references: Sequence[Tensor]
) -> float:
    """max over elements of |Δ| / max(|ref|, RMS of its row); the error of the log-sum-exp, if any, is scaled by the ratio of the limits."""
    import math

    import torch

    limits = _limits(problem)
    out, ref = outputs[0].double(), references[0].double()
    worst = 0.0
    if out.numel():
        rms = ref.square().mean(-1, keepdim=True).sqrt()
        delta = torch.where(
            out == ref, 0.0, (out - ref).abs() / torch.maximum(ref.abs(), rms).clamp_min(1e-30)
        )
        worst = float(delta.max())
    if len(outputs) > 1 and outputs[1].numel():
        lse, ref = outputs[1].double(), references[1].double()
        worst = max(
            worst, float(torch.where(lse == ref, 0.0, (lse - ref).abs()).max()) * limits[0] / limits[1]
        )
    return math.inf if math.isnan(worst) else worst
