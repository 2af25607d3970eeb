"""Exact verification of drafts by the request's own draws.

The sampler's draw at output index i is a function of the logits behind the true prefix, the request's seed and i. A step feeds the last
known token and k drafts, and draws at indices i ... i + k, each from the logits behind the drafts before it. A draft is accepted while
it equals the draw at its index; the first draw that differs is the next token, and behind k accepted drafts the last draw is one
more. Every token is therefore the one that decoding without drafts draws, greedy or sampled: there is no second random stream and no
draft distribution. For a draft of probability p(x) under the target the chance of acceptance is p(x), as in rejection sampling
(Leviathan et al., 2023, arXiv:2211.17192); a proposer that draws with the same noise agrees more often than an independent one
(Daliri, Musco, Suresh, 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest


def sampling_rows(entry: ScheduledRequest, row: SamplingRow) -> list[SamplingRow]:
    """The rows that an entry samples: of its last known token, then of each draft, at successive output indices.

    row: of the first of them.
    """
    if not entry.drafts:
        return [row]
    return [SamplingRow(row.params, row.seed, row.index + i) for i in range(1 + entry.drafts)]


def following_tokens(entry: ScheduledRequest, tokens: Sequence[int], run: Sequence[int] | None) -> list[int]:
    """The known tokens behind an entry's positions, from the first on. tokens: of the request before the step. run: as `accepted_runs`
    returned it; None if the entry does not sample."""
    if run is None:
        return [*tokens[entry.start + 1 : entry.context + 1]]
    return [*tokens[entry.start + 1 :], *(token for token in run if token >= 0)]


def accepted_runs(entries: Sequence[ScheduledRequest], drawn: Sequence[int]) -> list[list[int]]:
    """For each entry its new tokens: the accepted drafts, then the first draw that differs, or the draw behind the last draft.

    entries: those that sample. drawn: 1 + drafts ids for each of them in turn; negative = that row's logits were NaN. A run ends before a
    failed row; only a first row that failed is itself returned, [-1], so that the request fails where it would without drafts.
    """
    runs = []
    first = 0
    for entry in entries:
        draws = drawn[first : first + 1 + entry.drafts]
        first += len(draws)
        drafts = entry.draft_tokens
        accepted = 0
        while accepted < len(drafts) and draws[accepted] == drafts[accepted]:
            accepted += 1
        run = list(draws[: accepted + 1])
        if run[-1] < 0 and accepted:
            run.pop()
        runs.append(run)
    return runs
