"""Log-probabilities by torch, some rows at a time: a float32 copy, weights added as integers, and `topk` over distinct integer keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.sampling.logprobs import checked

if TYPE_CHECKING:
    import torch

    from gristmill.kernels.calls import LogprobsCall

ROWS = 64
"""Rows at a time; bounds the memory of their copies."""
ONE = 2.0**40
"""The largest weight of a row as an integer; the sum over a vocabulary of up to 2^22 tokens fits in int64."""


def log_sums(x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(x - peak))) of each row of float32 [rows, vocab], whose largest number is peak [rows, 1] -> float64 [rows, 1].

    Weights are added as integers: the order in which a reduction adds depends on its number of rows, and the same logits have the same
    log-probabilities in every batch.
    """
    import torch

    weights = (x - peak).exp_().mul_(ONE).to(torch.int64)
    return weights.sum(1, keepdim=True).double().div_(ONE).log_()


def first_of_equals(x: torch.Tensor, k: int) -> torch.Tensor:
    """The columns of the k largest numbers of each row of float32 [rows, vocab], in order: int64 [rows, k]. Of equal ones the lower column
    comes first, in keys of the number, as an integer of the same order, and its column."""
    import torch

    bits = (x + 0.0).view(torch.int32)  # 0.0 is as large as -0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    columns = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
    return ((ordered << 32) + columns).topk(k, 1).indices


def launch(config: Config, call: LogprobsCall) -> None:
    """The arguments of `logprobs.reference`."""
    import torch

    places = checked(call.logits, call.places, call.ids)
    for first in range(0, len(places), ROWS):
        some = places[first : first + ROWS]
        x, token = call.logits[some].float(), call.ids[some][:, None]
        chosen = x.gather(1, token.clamp(min=0)).masked_fill_(token < 0, torch.nan)
        peak = x.amax(1, keepdim=True)  # NaN if one is
        order = first_of_equals(x, call.k)
        broken = ~(peak.abs() < torch.inf)
        likelier = (x > chosen).sum(1, keepdim=True)
        logprobs = torch.cat((chosen, x.gather(1, order)), 1).sub_(peak) - log_sums(x, peak)
        call.logprobs[first : first + ROWS] = logprobs.masked_fill_(broken, torch.nan)
        call.tokens[first : first + ROWS] = torch.cat((likelier, order), 1).masked_fill_(broken, 0)


KERNEL = Kernel(
    op="logprobs",
    name="logprobs_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch's operations, 64 rows at a time",
    batch_invariant=True,
)
