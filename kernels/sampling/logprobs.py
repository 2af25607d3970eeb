"""Log-probabilities: of one token of each chosen row of logits, of the most likely ones, and how many are likelier than it.

They are the log-softmax of the logits as the model gave them: `process_logits`, temperature and filters come after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import VECTORS, Scalar, Tensor, WorkspaceArgument
from gristmill.kernel_registry.op import VERIFIED_ROWS, Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import FLOATS, ITEM_BYTES, need
from gristmill.kernels.random_inputs import Draw
from gristmill.kernels.sampling.sample import vocabulary_fits_int32

if TYPE_CHECKING:
    import torch

PART = 8192
"""Columns that a kernel may take at a time; a smaller problem with as many parts is like a larger one."""


def reference(
    logits: torch.Tensor,
    places: torch.Tensor,
    ids: torch.Tensor,
    k: int = 0,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, V], of which the rows places int64 [M] are read; ids int64 [id rows], whose element at a row's place is the row's token
    -> float32 [M, 1 + k], the log-probability of the token and those of the k most likely tokens, in order; int32 [M, 1 + k], how many tokens are
    likelier than the token, and the ids of the most likely ones, of equal ones the lower id first.

    A token of -1 has the log-probability NaN, and none is likelier. So it is with everything of a row with a NaN or +inf, or with nothing above
    -inf, whose ids are 0: such logits are an upstream fault.

    A place or token that is not there is an error: on a CPU it raises; a device kernel, which cannot raise without synchronising, reads nothing for
    it.
    """
    import torch

    tokens = ids[checked(logits, places, ids)]
    x = logits[places].double()
    chosen = x.gather(1, tokens.clamp(min=0)[:, None]).masked_fill((tokens < 0)[:, None], torch.nan)
    values, order = (part[:, :k] for part in x.sort(dim=1, descending=True, stable=True))
    broken = (x.isnan() | (x == torch.inf)).any(1, keepdim=True) | (x == -torch.inf).all(1, keepdim=True)
    likelier = (x > chosen).sum(1, keepdim=True)
    logprobs = torch.cat((chosen, values), 1) - x.logsumexp(1, keepdim=True)
    found = torch.cat((likelier, order), 1).masked_fill(broken, 0)
    return logprobs.masked_fill(broken, torch.nan).float(), found.int()


def checked(logits: torch.Tensor, places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The places; on a CPU a ValueError unless they and their tokens are there."""
    if logits.device.type == "cpu" and len(places):
        rows, v = min(len(logits), len(ids)), logits.shape[1]
        least, most = (int(value) for value in places.aminmax())
        need(least >= 0 and most < rows, f"logprobs: places must be below {rows}, got {least} to {most}")
        low, high = (int(value) for value in ids[places].aminmax())
        need(low >= -1 and high < v, f"logprobs: ids must be from -1 to {v - 1}, got {low} to {high}")
    return places


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor | int | None]:
    """Rows in any order, with ties, tokens at -inf and tokens that are missing; some rows are not numbers."""
    import torch

    draw, (m, v, k) = Draw(problem, seed, device), problem.integers("m", "v", "k")
    generator, rows = draw.generator, m + 2
    logits = (3 * draw.normal(rows, v + 1)).to(draw.dtype)[:, :v]
    logits[draw.uniform(rows, v) < 0.05] = -torch.inf
    logits[:, v // 2] = logits[:, v // 3]
    logits[:, 0] = logits[:, 0].nan_to_num(neginf=1.0)
    if rows > 8:
        logits[1, v // 2], logits[2, v - 1] = float("nan"), float("inf")
        logits[3] = -torch.inf
    places = torch.randperm(rows, generator=generator)[:m]
    ids = torch.randint(-1, v, (rows + 1,), generator=generator)
    return [logits.to(device), places.to(device), ids.to(device), k, None]


def error(
    problem: Problem,
    arguments: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """Largest |Δ| / (1 + |reference|) of the log-probabilities; infinite for another count or id."""
    import torch

    (out, tokens), (ref, expected) = outputs, references
    if not torch.equal(tokens, expected):
        return float("inf")
    same = (out == ref) | (out.isnan() & ref.isnan())
    delta = torch.where(same, 0.0, (out.double() - ref.double()).abs() / (1 + ref.double().abs()))
    return float(delta.nan_to_num(torch.inf).max()) if delta.numel() else 0.0


def check(problem: Problem) -> str | None:
    """There are no more tokens than the vocabulary has."""
    v, k = problem.integers("v", "k")
    return None if k <= v else f"k must be at most {v} (v), got {k}"


def cost(problem: Problem) -> Cost:
    """Logits read once."""
    m, v, k = problem.integers("m", "v", "k")
    return Cost(
        bytes=m * v * ITEM_BYTES[problem.text("x")] + 8 * m * (1 + k), flops=m * v * (4 + k), unit="fp32"
    )


def shrink(problem: Problem) -> Problem:
    """Fewer rows, and a vocabulary of a few parts with the same remainders."""
    m, v = problem.integers("m", "v")
    return problem.with_values(m=min(m, VERIFIED_ROWS // 8), v=v if v <= 3 * PART else 2 * PART + v % PART)


OP = Op(
    name="logprobs",
    family="sampling",
    summary="log-probabilities of one token of a row and of its most likely ones",
    axes=(
        Axis("m", "int", "rows that are read", dynamic=True),
        Axis("v", "int", "vocabulary", minimum=1),
        Axis("k", "int", "most likely tokens of each row", default=0, minimum=0),
        Axis("x", "dtype", "dtype of the logits", default="bf16", choices=FLOATS),
    ),
    arguments=(
        Tensor("logits", "rows v", strides=VECTORS),
        Tensor("places", "m", dtype="int64"),
        Tensor("ids", "id_rows", dtype="int64"),
        Scalar("k", "int", 0, minimum=0, maximum="v"),
        WorkspaceArgument(),
    ),
    returns=(Tensor("logprobs", "m 1+k", dtype="fp32"), Tensor("tokens", "m 1+k", dtype="int32")),
    rules=(vocabulary_fits_int32,),
    reference=reference,
    inputs=inputs,
    error=error,
    check=check,
    cost=cost,
    # A float32 sum of a whole row, and the logarithm of it.
    tolerance=lambda problem: Tolerance("relative", 2e-6),
    bucket="m",
    shrink=shrink,
    examples=problems(
        """
        m=0,v=16,k=2  m=1,v=1,k=1,x=fp32  m=7,v=257,k=5  m=33,v=31,x=fp16  m=5,v=8192,k=20,x=fp32  m=9,v=16421,k=20
        """
    ),
    bench=problems("m=1,v=151936,k=20  m=25,v=151936,k=20  m=256,v=151936,k=20"),
)
