"""The engine's drafts: the proposer is asked before a step, its drafts are verified after it, and counted.

Verification is exact. The sampler's draw at output index i is a function of the logits after the true prefix, the request's seed and i. A
step feeds the last known token and k drafts, and draws at indices i ... i + k, each from the logits after the drafts before it. A draft is
accepted while it equals the draw at its index; the first draw that differs is the next token, and after k accepted drafts the last draw is
one more. Every token is therefore the one that decoding without drafts draws, greedy or sampled: there is no second random stream and no
draft distribution. For a draft of probability p(x) under the target the probability of acceptance is p(x), as in rejection sampling
(Leviathan et al., 2023, arXiv:2211.17192); a proposer that draws with the same noise agrees more often than an independent one (Daliri,
Musco, Suresh, 2024, arXiv:2408.07978).

A proposer gets the decoding requests before a step (`DraftRequest`: known tokens, the most drafts, how its next token is sampled) and returns
token ids; it may be wrong, late or empty. The speculator chooses the requests that take drafts, cuts drafts that cannot be verified (outside the
vocabulary, against the grammar), and hands the rest to ``Scheduler.propose``, which may take fewer: drafts are given up before a request is
preempted. Logits processors of a row see the drafts
that precede it. KV of rejected drafts is overwritten later, and a block is registered in the prefix cache only when accepted tokens fill it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.residency import Part, Residency
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import Pause, Request, ScheduledRequest, ScheduledStep, Scheduler
from gristmill.runtime.speculation import DraftRequest, Proposer, StateReader
from gristmill.runtime.speculation.config import Speculation
from gristmill.runtime.speculation.statistics import DraftCounts, RequestGain, SpeculationStatus, StepGains


class Speculator:
    """Drafts for the requests of one scheduler.

    Args:
        config: what the user asked for.
        proposer: the proposer made for it.
        row_of: how the next token of a request is sampled.
        processors: the processors whose grammars limit drafts.
        vocab_size: vocabulary of the target model.
        clock: returns seconds.
    """

    def __init__(
        self,
        config: Speculation,
        proposer: Proposer,
        scheduler: Scheduler,
        processors: LogitsProcessors,
        vocab_size: int,
        row_of: Callable[[str], SamplingRow],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.proposer = proposer
        self.counts = DraftCounts(config.most_tokens)
        self._scheduler = scheduler
        self._processors = processors
        self._vocab_size = vocab_size
        self._row_of = row_of
        self._clock = clock
        self._steps = StepGains()
        self._gains: dict[str, RequestGain] = {}
        self._residency = None if proposer.runner is None else Residency(proposer.runner)
        self._began = 0.0
        self._taken: float | None = None  # when the results of the step before were there; None: nothing ran

    def waits(self) -> bool:
        """Whether the next step takes drafts, and so waits for the results of the step in flight. If not, it is launched without."""
        takers, refused = self._takers()
        if not takers:
            self.counts.reasons.update(refused)
        return bool(takers)

    def propose(self) -> bool:
        """Give the scheduler drafts for its next step; no step is in flight. Returns whether the proposer was asked."""
        self._began = self._clock()
        if self._scheduler.paused is Pause.ALL or not self._scheduler.running:
            self._taken = None
            return False
        requests, refused = self._takers()
        self.counts.reasons.update(refused)
        if not requests:
            return False
        proposed = self.proposer.propose(requests)
        if len(proposed) != len(requests):
            raise RuntimeError(
                f"proposer {self.config.method!r} returned drafts for {len(proposed)} of {len(requests)} requests"
            )
        for request, drafts in zip(requests, proposed, strict=True):
            kept = self._sound(request, drafts)
            if kept:
                self._scheduler.propose(request.id, kept)
        return True

    def verify(
        self, step: ScheduledStep, drawn: Sequence[int], drafting: bool, usual: bool = True
    ) -> list[list[int]]:
        """The new tokens of each entry that samples, from the ids that were drawn for its rows; counts what was accepted.

        Args:
            drafting: whether the step is one of drafting, in the comparison of times.
            usual: whether it ran as such steps usually do. A step without drafts does not, where others run ahead and it did not.
        """
        entries = step.sampling()
        runs = accepted_runs(entries, drawn)
        if isinstance(self.proposer, StateReader):
            of_entries, following = iter(runs), []
            for entry in step.entries:
                run = next(of_entries) if entry.samples else None
                request = self._scheduler.current(entry)  # None: it has ended, while the step was in flight
                following.append([] if request is None else following_tokens(entry, request.tokens, run))
            self.proposer.computed(step.entries, following)
        for entry, run in zip(entries, runs, strict=True):
            if entry.drafts:
                accepted = len(run) - 1
                self.counts.verified(entry.drafts, accepted)
                request = self._scheduler.requests[entry.id]
                outputs = len(request.tokens) - request.prompt_len + len(run)
                self._gains.setdefault(entry.id, RequestGain()).verified(accepted, outputs)
        now = self._clock()
        seconds = now - (self._began if self._taken is None else self._taken)
        self._taken = now
        if usual and entries and all(e.samples and e.count == 1 + e.drafts for e in step.entries):
            self._steps.measured(len(entries), seconds, sum(map(len, runs)), drafting)
        return runs

    def ended(self, request: Request) -> None:
        """A request has ended."""
        self._gains.pop(request.id, None)
        self.proposer.ended(request.id, request.tokens, request.prompt_len)

    def reset(self) -> None:
        """Forget what was learned: the engine has new weights."""
        self.proposer.reset()

    def sleep(self) -> None:
        """Give back a draft model's memory; its weights stay in host memory, because no update brings them again."""
        self.reset()
        if self._residency is not None:
            self._residency.sleep(1)

    def wake_up(self, parts: Collection[Part]) -> None:
        """Allocate what `sleep` gave back."""
        if self._residency is not None:
            self._residency.wake_up(parts)

    def status(self) -> SpeculationStatus:
        """The counts so far, as values."""
        counts, runner = self.counts, self.proposer.runner
        return SpeculationStatus(
            method=self.config.method,
            drafts=counts.drafts,
            draft_tokens=counts.draft_tokens,
            accepted_tokens=sum(counts.accepted),
            accepted_by_position=tuple(counts.accepted),
            reasons=dict(counts.reasons),
            gains=self._steps.gains(),
            draft_bytes=0 if runner is None else runner.model.plans.weight_bytes + runner.cache.nbytes,
        )

    def _takers(self) -> tuple[list[DraftRequest], Counter[str]]:
        """The requests that take drafts in the next step, as far as it is known before the results of the step in flight; and how many others
        do not, by reason."""
        refused = Counter[str]()
        decoding = [
            request
            for request in self._scheduler.running
            if len(request.tokens) + request.pending - request.computed == 1
            and request.computed + 1 < request.limit
        ]
        if not decoding or self._scheduler.paused is Pause.ALL:
            return [], refused
        if self.config.adaptive and (reason := self._steps.refusal(len(decoding))):
            refused[reason] += len(decoding)
            return [], refused
        # Every decoding request has room for one token; the rest of the step's tokens is shared.
        share = self._scheduler.config.max_batch_tokens // len(decoding) - 1
        takers = []
        for request in decoding:
            known = len(request.tokens) + request.pending
            count = min(self.config.most_tokens, share, request.limit - known - 1)
            if count < 1:
                refused["no room for drafts in the step" if share < 1 else "the last token of an output"] += 1
                continue
            gain = self._gains.get(request.id)
            if self.config.adaptive and gain is not None and known - request.prompt_len < gain.resumes_at:
                refused["the request's drafts were rejected"] += 1
                continue
            row = self._row_of(request.id)
            takers.append(DraftRequest(request.id, request.tokens, request.prompt_len, count, row))
        return takers, refused

    def _sound(self, request: DraftRequest, drafts: Sequence[int]) -> list[int]:
        """The drafts up to the first that cannot be verified: outside the vocabulary, or against the grammar."""
        reasons = self.counts.reasons
        if not drafts:
            reasons["the proposer had no drafts"] += 1
            return []
        kept = list(drafts[: request.count])
        outside = next((i for i, token in enumerate(kept) if not 0 <= token < self._vocab_size), None)
        if outside is not None:
            reasons["a draft outside the vocabulary"] += 1
            kept = kept[:outside]
        legal = self._processors.legal(request.id, kept)
        if legal < len(kept):
            reasons["a draft against the grammar"] += 1
            kept = kept[:legal]
        return kept


def sampling_rows(entry: ScheduledRequest, row: SamplingRow) -> list[SamplingRow]:
    """The rows that an entry samples: after its last known token, then after each draft, at successive output indices. `row` is the first of them."""
    if not entry.drafts:
        return [row]
    return [SamplingRow(row.params, row.seed, row.index + i) for i in range(1 + entry.drafts)]


def following_tokens(entry: ScheduledRequest, tokens: Sequence[int], run: Sequence[int] | None) -> list[int]:
    """The known tokens that follow an entry's positions, from the first on.

    Args:
        tokens: the tokens of the request before the step.
        run: as `accepted_runs` returned it; None if the entry does not sample.
    """
    if run is None:
        return [*tokens[entry.start + 1 : entry.context + 1]]
    return [*tokens[entry.start + 1 :], *(token for token in run if token >= 0)]


def accepted_runs(entries: Sequence[ScheduledRequest], drawn: Sequence[int]) -> list[list[int]]:
    """For each entry its new tokens: the accepted drafts, then the first draw that differs, or the draw after the last draft.

    A run ends before a failed row; only a first row that failed is itself returned, [-1], so that the request fails where it would without
    drafts.

    Args:
        entries: the entries that sample.
        drawn: 1 + drafts ids for each of them in turn; negative = the logits of that row were NaN.
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
