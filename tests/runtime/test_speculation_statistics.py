"""Verification by the sampler's own draws leaves the distribution as it is: chi-square tests on a toy vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from gristmill import ops
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.speculation.speculator import accepted_runs, sampling_rows

VOCAB, REQUESTS = 50, 34_000
TEMPERATURE, TOP_P = 0.8, 0.9
CRITICAL = 1e-4
"""Probability with which a correct sampler fails a test; the seeds are fixed, so it fails always or never."""


def chain() -> Tensor:
    """Returns logits [VOCAB, VOCAB]: of the next token, by the last one."""
    return 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


def exact(logits: Tensor) -> Tensor:
    """Returns the probabilities after temperature and top_p, float64."""
    p = (logits.double() / TEMPERATURE).softmax(-1)
    order = p.argsort(-1, descending=True)
    cumulative = p.gather(-1, order).cumsum(-1)
    kept = (cumulative - p.gather(-1, order)) < TOP_P
    p = p * torch.zeros_like(kept).scatter(-1, order, kept)
    return p / p.sum(-1, keepdim=True)


def p_value(ids: Tensor, probabilities: Tensor) -> float:
    """Returns the probability of a chi-square at least as large as that of the ids; tokens expected under 5 times are merged."""
    expected = probabilities * len(ids)
    counts = torch.bincount(ids, minlength=VOCAB).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None].clamp_min(1e-9)])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    if expected[-1] < 5:
        assert counts[-1] <= 30, "tokens that the filter bars were drawn"
        expected, counts = expected[:-1], counts[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@dataclass
class Drawn:
    """The first three tokens of each request behind token 0; -1 where a run was shorter."""

    tokens: Tensor
    accepted: float


Rows = Callable[[ScheduledRequest, SamplingRow], list[SamplingRow]]


@cache
def draw(draft: Callable[[Tensor], Tensor], rows_of: Rows = sampling_rows) -> Drawn:
    """Verifies two drafts for each request in one call of the sampler. draft: of a last token, int64 [n] -> [n]."""
    logits = chain()
    first = draft(torch.zeros(REQUESTS, dtype=torch.int64))
    second = draft(first)
    entries = [
        ScheduledRequest(str(i), 4, 3, True, [0, a, b], [0], [], 2)
        for i, (a, b) in enumerate(zip(first.tolist(), second.tolist(), strict=True))
    ]
    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)
    rows = [row for seed, entry in enumerate(entries) for row in rows_of(entry, SamplingRow(params, seed, 5))]
    last = torch.tensor([token for entry in entries for token in entry.tokens])
    count = len(rows)
    ids = ops.sample(
        logits[last],
        torch.full((count,), TEMPERATURE),
        torch.zeros(count, dtype=torch.int32),
        torch.full((count,), TOP_P),
        torch.zeros(count),
        torch.tensor([row.seed for row in rows]),
        torch.tensor([row.index for row in rows]),
    )
    runs = accepted_runs(entries, ids.tolist())
    tokens = torch.tensor([[*run, -1, -1][:3] for run in runs])
    return Drawn(tokens, sum(len(run) - 1 for run in runs) / (2 * len(runs)))


def p_values(drawn: Drawn) -> list[float]:
    """Of the first token; of the second behind each frequent first one; of the third behind the second."""
    probabilities, tokens = exact(chain()), drawn.tokens
    values = [p_value(tokens[:, 0], probabilities[0])]
    for place in (0, 1):
        known = tokens[:, place + 1] >= 0
        for token in torch.bincount(tokens[known, place], minlength=VOCAB).topk(3).indices.tolist():
            after = tokens[known & (tokens[:, place] == token), place + 1]
            if len(after) > 500:
                values.append(p_value(after, probabilities[token]))
    return values


def likeliest(last: Tensor) -> Tensor:
    return chain()[last].argmax(-1)


def by_seed(last: Tensor) -> Tensor:
    """Another draft for each request, likely ones more often."""
    generator = torch.Generator().manual_seed(9)
    return torch.multinomial(chain()[last].softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("draft", [likeliest, by_seed])
def test_the_distribution_with_drafts(draft: Callable[[Tensor], Tensor]) -> None:
    drawn = draw(draft)
    values = p_values(drawn)
    assert len(values) >= 3 and min(values) > CRITICAL / len(values), values
    # A draft x is accepted with probability p(x).
    agreement = (exact(chain())[0][draft(torch.zeros(REQUESTS, dtype=torch.int64))]).mean()
    assert float((drawn.tokens[:, 1] >= 0).double().mean()) == pytest.approx(float(agreement), abs=0.01)


def test_one_noise_for_the_whole_run_shows() -> None:
    """Planted fault: the drafted rows draw with the output index of the first."""

    def same_index(entry: ScheduledRequest, row: SamplingRow) -> list[SamplingRow]:
        return [row] * (1 + entry.drafts)

    assert min(p_values(draw(likeliest, same_index))) < CRITICAL / 100


def test_ids_do_not_depend_on_the_drafts() -> None:
    """Two proposers: where both runs have a token, it is the same one."""
    one, other = draw(likeliest).tokens, draw(by_seed).tokens
    both = (one >= 0) & (other >= 0)
    assert torch.equal(one[both], other[both]) and both[:, 1].sum() > 100
