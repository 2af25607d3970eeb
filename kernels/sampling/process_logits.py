"""Process logits: what requests ask for before their tokens are drawn, biases, penalties, bans and grammars, of chosen rows in one pass.

Penalties as transformers (repetition; Keskar et al., 2019, arXiv:1909.05858) and the OpenAI API (frequency and presence) define them. The state
of a request is a slot, a row of `seen` and of `bias`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import VECTORS, Tensor
from gristmill.kernel_registry.op import VERIFIED_ROWS, Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES, need
from gristmill.kernels.random_inputs import Draw
from gristmill.kernels.sampling.sample import vocabulary_fits_int32

if TYPE_CHECKING:
    import torch

PART = 8192
"""Columns of which `largest` has one value."""
NOTHING, FED = -1, -2
"""In `counted` and `barred`, no token, and in `counted` the one that the row is fed."""


def reference(
    logits: torch.Tensor,
    places: torch.Tensor,
    fed: torch.Tensor,
    slots: torch.Tensor,
    penalties: torch.Tensor,
    seen: torch.Tensor,
    bias: torch.Tensor,
    counted: torch.Tensor,
    barred: torch.Tensor,
    mask: torch.Tensor,
    mask_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, V], of which the rows places int64 [M] are processed -> float32 [M, V], and the largest of each `PART` columns.

    For each row, in this order:

    1. bias float32 [slots, V] (or [0, V]: none) of its slot, slots int32 [M], is added; -1 = it has no slot.
    2. penalties float32 [3, M], repetition r, frequency f and presence p, by seen int32 [slots, V] (or [0, V]: none), which is
       twice the number of times that a token is in the output, plus 1 if it is in the prompt. Tokens counted int32 [M, C] count once more, for
       this row alone: ids, -1 for none, and -2 for the one that the row is fed, fed int64 [fed rows] at its place. A token of the prompt or
       the output has its logit divided by r if it is positive, else multiplied by r; then f times its count is subtracted, and p if it
       is in the output.
    3. barred int32 [M, B, 2]: pairs (after, token); the token becomes -inf, if `after` is -1 or the token that the row is fed. Token -1 = no pair.
    4. mask int32 [masks, (V + 31) / 32], bit i of word w for token 32 w + i, of the row mask_rows int32 [M], -1 = none: tokens without a
       bit become -inf.

    largest float32 [2, M, parts]: of the logits as they came, and of the result, where NaN counts as +inf.

    A place, slot, token or mask that is not there is an error: on a CPU it raises; a device kernel, which cannot raise without
    synchronising, reads nothing for it.
    """
    import torch

    v = logits.shape[1]
    if logits.device.type == "cpu":
        slot_count = min((len(state) for state in (seen, bias) if len(state)), default=None)
        masks = len(mask) or None
        _within("places", places, 0, min(len(logits), len(fed)))
        _within("slots", slots, -1, slot_count)
        _within("fed", fed[places], -1, v)
        _within("counted", counted, FED, v)
        _within("barred", barred, NOTHING, v)
        _within("mask_rows", mask_rows, NOTHING, masks)
    x = logits[places].float()
    largest = [_largest(x)]
    tokens = fed[places]
    has_slot, slot = slots >= 0, slots.clamp(min=0).long()
    if bias.shape[0]:
        x = x + torch.where(has_slot[:, None], bias[slot], 0.0)
    if seen.shape[0]:
        state = torch.where(has_slot[:, None], seen[slot], 0)
        counts = state >> 1
        more = torch.where(counted == FED, tokens[:, None], counted)
        counts.scatter_add_(1, more.clamp(min=0), (more >= 0).int())
        repetition, frequency, presence = penalties[:, :, None]
        output = counts > 0
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(output | (state & 1).bool(), repeated, x)
        x = x - frequency * counts
        x = x - presence * output
    after, banned = barred.unbind(2)
    holds = (banned >= 0) & ((after == NOTHING) | (after == tokens[:, None]))
    hit = torch.zeros(len(x), v, dtype=torch.int32, device=x.device)
    hit.scatter_add_(1, banned.clamp(min=0).long(), holds.int())
    x = x.masked_fill(hit > 0, -torch.inf)
    if mask.shape[0]:
        bits = torch.arange(32, dtype=torch.int32, device=x.device)
        words = torch.where(mask_rows[:, None] >= 0, mask[mask_rows.clamp(min=0).long()], -1)
        allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :v]
        x = x.masked_fill(~allowed, -torch.inf)
    largest.append(_largest(x))
    return x, torch.stack(largest)


def _within(name: str, values: torch.Tensor, low: int, end: int | None) -> None:
    """ValueError unless all values are from `low` to below `end`; None = nobody reads them."""
    if values.numel() and end is not None:
        least, most = (int(value) for value in values.aminmax())
        need(
            least >= low and most < end,
            f"process_logits: {name} must be from {low} to {end - 1}, got {least} to {most}",
        )


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest of each `PART` columns of x [M, V]."""
    import torch

    numbers = torch.where(x.isnan(), torch.inf, x)
    parts = -(-x.shape[1] // PART)
    padded = torch.nn.functional.pad(numbers, (0, parts * PART - x.shape[1]), value=-torch.inf)
    largest: torch.Tensor = padded.view(-1, parts, PART).amax(2)
    return largest


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor]:
    """Rows of every kind: with and without a slot and a grammar, tokens that occur twice, fed and drafted ones; some logits are not numbers."""
    import torch

    draw, (m, v) = Draw(problem, seed, device), problem.integers("m", "v")
    generator, rows, slots = draw.generator, m + 2, 3

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    logits = (3 * draw.normal(rows, v + 1)).to(draw.dtype)[:, :v]
    if rows > 4:
        logits[1, v // 2], logits[2, 0] = float("nan"), float("inf")
    places = torch.randperm(rows, generator=generator)[:m]
    seen = torch.where(draw.uniform(slots, v) < 0.3, whole(0, 8, slots, v), 0)
    bias = torch.where(draw.uniform(slots, v) < 0.1, draw.normal(slots, v), 0.0)
    bias[draw.uniform(slots, v) < 0.05] = -torch.inf
    penalties = torch.stack([draw.uniform(m) + 0.5, draw.uniform(m) - 0.3, draw.uniform(m)])
    counted = torch.stack([whole(0, v, m), whole(0, v, m), whole(FED, 0, m), whole(NOTHING, v, m)], 1)
    counted[:, 1] = torch.where(draw.uniform(m) < 0.5, counted[:, 0], counted[:, 1])
    fed = whole(0, v, rows).long()
    barred = torch.stack([whole(NOTHING, min(2, v), m, 3), whole(NOTHING, v, m, 3)], 2)
    barred[:, 0, 0] = fed[places].int()
    limits = torch.iinfo(torch.int32)
    mask = whole(limits.min, limits.max, 2, -(-v // 32))
    given = [places, fed, whole(-1, slots, m), penalties, seen.int(), bias, counted, barred, mask]
    return [logits.to(device), *(one.to(device) for one in (*given, whole(-1, 2, m)))]


def error(
    problem: Problem,
    arguments: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """Largest |Δ| / (1 + |reference|), infinite where one is infinite and the other is not: 1 stands for what is subtracted."""
    import torch

    worst = 0.0
    for out, ref in zip(outputs, references, strict=True):
        same = (out == ref) | (out.isnan() & ref.isnan())
        delta = torch.where(same, 0.0, (out.double() - ref.double()).abs() / (1 + ref.double().abs()))
        worst = max(worst, float(delta.nan_to_num(torch.inf).max()) if delta.numel() else 0.0)
    return worst


def cost(problem: Problem) -> Cost:
    """Logits, both states and the mask read once, the result written once."""
    m, v = problem.integers("m", "v")
    return Cost(bytes=m * v * (ITEM_BYTES[problem.text("x")] + 12) + m * v // 8, flops=8 * m * v, unit="fp32")


def shrink(problem: Problem) -> Problem:
    """Fewer rows, and a vocabulary of a few parts with the same remainders."""
    m, v = problem.integers("m", "v")
    return problem.with_values(m=min(m, VERIFIED_ROWS // 8), v=v if v <= 3 * PART else 2 * PART + v % PART)


OP = Op(
    name="process_logits",
    family="sampling",
    summary="biases, penalties, bans and grammars of chosen rows of logits",
    axes=(
        Axis("m", "int", "processed rows", dynamic=True),
        Axis("v", "int", "vocabulary", minimum=1),
        Axis("x", "dtype", "dtype of the logits", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("logits", "rows v", strides=VECTORS),
        Tensor("places", "m", dtype="int64"),
        Tensor("fed", "fed_rows", dtype="int64"),
        Tensor("slots", "m", dtype="int32"),
        Tensor("penalties", "3 m", dtype="fp32"),
        Tensor("seen", "seen_slots v", dtype="int32"),
        Tensor("bias", "bias_slots v", dtype="fp32"),
        Tensor("counted", "m counted_tokens", dtype="int32"),
        Tensor("barred", "m pairs 2", dtype="int32"),
        Tensor("mask", "masks (v+31)//32", dtype="int32"),
        Tensor("mask_rows", "m", dtype="int32"),
    ),
    returns=(
        Tensor("out", "m v", dtype="fp32"),
        Tensor("largest", f"2 m (v+{PART - 1})//{PART}", dtype="fp32"),
    ),
    rules=(vocabulary_fits_int32,),
    reference=reference,
    inputs=inputs,
    error=error,
    cost=cost,
    # A product and a difference, each rounded, or both at once.
    tolerance=lambda problem: Tolerance("relative", 1e-6),
    bucket="m",
    shrink=shrink,
    examples=problems(
        """
        m=0,v=16  m=1,v=1,x=fp32  m=7,v=257  m=33,v=31,x=fp16  m=5,v=8192,x=fp32  m=3,v=16421
        """
    ),
    bench=("m=1,v=151936", "m=25,v=151936", "m=256,v=151936"),
)
