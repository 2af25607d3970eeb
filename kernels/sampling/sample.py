"""Sample: one token per request from filtered logits, reproducible from the request's seed alone.

The Gumbel-max trick: argmax of logit + Gumbel noise is a draw from the softmax. The noise is Philox4x32-10 keyed by the
request (see philox.py), so the token depends on the request's own logits, parameters, seed and output index only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import VECTORS, Tensor, WorkspaceArgument
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""
LOGITS = ("fp32", "bf16")


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    index: torch.Tensor,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits [B, V]; for each request temperature, top_p, min_p float32 [B], top_k int32 [B], seed and index (the number of
    the output token) int64 [B] -> ids int64 [B].

    temperature below 1e-5: the largest logit, the lowest id among equals; the rest does not matter. Otherwise
    z = logit / temperature (a float32 division), filtered by `kept`, and the id is that of the largest
    z - log(-log(u)), in float64, u being the request's uniform of the token.

    A row with a NaN or +inf among its z (or logits, when greedy), or with nothing above -inf, gives -1: such logits are an
    upstream fault.
    """
    import torch

    from gristmill.kernels.sampling.philox import token_uniforms

    greedy = ~(temperature >= GREEDY_BELOW)
    z = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    if not z.numel():
        return torch.full((z.shape[0],), -1, dtype=torch.int64, device=z.device)
    noise = -(-token_uniforms(seed, index, z.shape[1]).log()).log()
    noisy = (z.double() + noise).masked_fill(~kept(z, top_k, top_p, min_p), -torch.inf)
    noisy = torch.where(greedy[:, None], z.double(), noisy)
    best = noisy.amax(-1, keepdim=True)
    place = torch.arange(z.shape[1], device=z.device)
    ids = torch.where(noisy == best, place, z.shape[1]).amin(-1)
    invalid = (z.isnan() | (z == torch.inf)).any(-1) | (z == -torch.inf).all(-1)
    return ids.masked_fill(invalid, -1)


def kept(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Which scaled logits z float32 [B, V] survive: bool [B, V]. The filters and their order are transformers'.

    1. top_k (off outside 1...V-1): those below the k-th largest go; all equal to it stay.
    2. top_p (off from 1 up): of what is left, in descending order, a token stays while the probability of those before it
       is below top_p; the first always stays. Among equals the lower id comes first (transformers sorts them unstably).
    3. min_p (off at 0): those less probable than min_p times the most probable go.

    Probabilities are float64.
    """
    import torch

    v = z.shape[1]
    ordered, order = z.sort(dim=-1, stable=True, descending=True)
    k = torch.where((top_k < 1) | (top_k >= v), v, top_k).long()
    kth = ordered.gather(-1, (k - 1)[:, None])
    keep = z >= kth
    top = ordered[:, :1].double()
    weights = torch.where(keep, (z.double() - top).exp(), 0.0)
    ranked = weights.gather(-1, order)
    before = ranked.cumsum(-1) - ranked
    p = torch.where(top_p < 1, top_p, torch.inf).double()
    inside = (before < p[:, None] * weights.sum(-1, keepdim=True)) | ~(top_p < 1)[:, None]
    inside[:, 0] = True
    keep &= torch.zeros_like(keep).scatter_(-1, order, inside)
    floor = torch.where(min_p > 0, min_p, 0.0).double()
    return keep & ((z.double() - top).exp() >= floor[:, None])


def vocabulary_fits_int32(v: int) -> str | None:
    """Tokens are numbered in int32."""
    return None if v < 2**31 else f"logits must have at most 2^31 - 1 tokens, got {v}"


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Requests of every kind: greedy and not, each filter on and off, ties and tokens at -inf among the logits."""
    import torch

    draw, (m, v) = Draw(problem, seed, device), problem.integers("m", "v")
    generator, logits = draw.generator, (2 * draw.normal(m, v)).to(draw.dtype)
    tied = draw.uniform(m, v) < 0.05
    logits = torch.where(tied & (torch.arange(m) % 2 == 0)[:, None], logits.amax(-1, keepdim=True), logits)
    barred = draw.uniform(m, v) < 0.02
    barred[:, 0] = False
    logits[barred] = -torch.inf

    def pick(*values: float) -> torch.Tensor:
        choices = torch.tensor(values, dtype=torch.float32)
        return choices[torch.randint(len(values), (m,), generator=generator)]

    parameters = [
        pick(0.0, 0.7, 1.0, 1.5),
        pick(0, 0, 1, 5, 40).to(torch.int32),
        pick(1.0, 0.9, 0.5),
        pick(0.0, 0.0, 0.05),
        torch.randint(-(2**62), 2**62, (m,), generator=generator) * 2 + 1,
        torch.randint(0, 2**40, (m,), generator=generator),
    ]
    return [logits.to(device), *(parameter.to(device) for parameter in parameters), None]


def cost(problem: Problem) -> Cost:
    """Logits read once. Philox and two logarithms for each token."""
    m, v = problem.integers("m", "v")
    return Cost(bytes=m * v * ITEM_BYTES[problem.text("x")] + 40 * m, flops=100 * m * v, unit="fp32")


OP = Op(
    name="sample",
    family="sampling",
    summary="one token per request: temperature, top-k, top-p, min-p, seeded Gumbel-max",
    axes=(
        Axis("m", "int", "requests", dynamic=True),
        Axis("v", "int", "vocabulary", minimum=1),
        Axis("x", "dtype", "dtype of the logits", default="fp32", choices=LOGITS),
    ),
    arguments=(
        Tensor("logits", "m v", strides=VECTORS),
        Tensor("temperature", "m", dtype="fp32"),
        Tensor("top_k", "m", dtype="int32"),
        Tensor("top_p", "m", dtype="fp32"),
        Tensor("min_p", "m", dtype="fp32"),
        Tensor("seed", "m", dtype="int64"),
        Tensor("index", "m", dtype="int64"),
        WorkspaceArgument(),
    ),
    returns=(Tensor("ids", "m", dtype="int64"),),
    rules=(vocabulary_fits_int32,),
    reference=reference,
    inputs=inputs,
    cost=cost,
    # The same ids: scores are float64, so two implementations differ about once in 10^13 draws.
    tolerance=lambda problem: Tolerance("exact", 0.0),
    bucket="m",
    examples=("m=0,v=16", "m=1,v=1", "m=33,v=7", "m=7,v=257,x=bf16", "m=19,v=1000", "m=5,v=4099,x=bf16"),
    bench=("m=1,v=128256", "m=8,v=128256", "m=64,v=128256", "m=256,v=128256", "m=64,v=32000,x=bf16"),
)
