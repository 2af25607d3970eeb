"""The steps of an engine in flight: each is scheduled and launched before the results of the one before it are there, as far as it can be.

On GPUs the host schedules and launches step t + 1 while step t runs, and then takes the results of t. On a CPU, where nothing overlaps, and with
``async_steps=False``, it takes the results of each step before it schedules the next. Ids are the same. The device computes everything in the
order of launches, on one stream, so what is left is bookkeeping:

- Two committed steps may be in flight. ``Request.pending`` counts the tokens that they sample and the host has not seen; a step is scheduled
  over known + pending tokens. ``Request.tokens`` holds real ids only.
- A request has a fixed row while it runs. The end of a step writes its ids to the rows (`SampledTokens`), and the next step reads them
  there; its entry says ``tokens=None``.
- The end by length is known in advance: the request is scheduled no further. The end by an end token is seen one step late: what the step in
  flight computes for that request is dropped. Row and blocks are free at once, because their next owner runs later.
- A block is registered in the prefix cache when the results of the step that filled it are there.
- Log-probabilities are copied to the host with the ids. Penalties and bans count the token that the host has not seen on the device.
- A row with a grammar must know the tokens before it: the rest of its step is launched ahead, and when the results of the step before are there, the
  host computes which tokens may come next, beside the step that runs, and the row is sampled behind that.
- A step that needs the host between the steps waits for the results and runs alone, as synchronous steps do: where tokens are drafted, and where
  the scheduler must preempt a request. While drafting rests, because it loses or the requests' drafts were rejected, steps run ahead.
- An exception discards both steps; their requests are as the results before left them. A row without a result (NaN) ends its request one
  step late, with ``finish_reason="error"`` and the cause.
- Host memory that a copy reads or writes belongs to its step until an event says that it has ended (`StepRing`). The host waits for
  nothing else.

``Engine.step`` returns the outputs of one step, as without: the first call launches two steps, later ones one. A request that is added between
two calls joins the step after the one in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.runtime.logprobs import PromptLogprobs, PromptPart, prompt_parts
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import (
    RequestOutput,
    ScheduledRequest,
    ScheduledStep,
    Scheduler,
    TokenLogprobs,
)
from gristmill.runtime.speculation.speculator import Speculator, sampling_rows


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step whose outputs were not taken yet.

    Attributes:
        step: what the runner's `launch` returned.
        prompts: the log-probabilities of prompts that it reads, by request id: those of the requests that it was launched with.
        ahead: whether it was launched before the results of the step before it were there.
        asked: whether the proposer was asked for drafts.
    """

    scheduled: ScheduledStep
    step: Any
    launched: float
    prompts: Mapping[str, tuple[PromptLogprobs, PromptPart]]
    ahead: bool
    asked: bool


class StepPipeline:
    """Runs the steps of a scheduler, up to `depth` of them at a time.

    Args:
        sampling_rows: how the first token that each of these entries samples is sampled.
        prompts: the log-probabilities of those prompts that are read.
        speculator: drafts before a step, which has the results of all steps before it then; None = no drafts.
    """

    def __init__(
        self,
        runner: Runner | ParallelRunner,
        scheduler: Scheduler,
        depth: int,
        sampling_rows: Callable[[Sequence[ScheduledRequest]], list[SamplingRow]],
        prompts: Mapping[str, PromptLogprobs],
        speculator: Speculator | None,
    ) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.depth = depth
        self.speculator = speculator
        self.in_flight: list[_InFlight] = []  # oldest first
        self.last_step: ScheduledStep | None = None
        self.last_launched = 0.0
        self._sampling_rows = sampling_rows
        self._prompts = prompts

    def advance(self) -> tuple[list[RequestOutput], Mapping[str, list[TokenLogprobs]]]:
        """Launch what can be launched, and wait for the oldest step. Its outputs, and the log-probabilities of their tokens by request.

        last_step becomes that step; it is empty if there was nothing to do. last_launched: when it was scheduled, by
        time.monotonic. An exception discards all steps in flight.
        """
        if self.in_flight:
            self._complete()
        while len(self.in_flight) < self.depth and self._launch():
            pass
        if not self.in_flight:
            return [], {}
        oldest = self.in_flight[0]
        try:
            result = self.runner.collect(oldest.step)
            runs = (
                result.ids if self.speculator is None else self._verify(self.speculator, oldest, result.ids)
            )
            outputs = self.scheduler.update(oldest.scheduled, runs)
        except BaseException:
            self.discard()
            raise
        del self.in_flight[0]
        for request_id, (prompt, part) in oldest.prompts.items():
            prompt.add(part, result.prompts[request_id])
        if result.errors:
            for output in outputs:
                if output.error is not None:
                    output.error = result.errors.get(output.id, output.error)
        self.last_step, self.last_launched = oldest.scheduled, oldest.launched
        return outputs, result.logprobs

    def drop_idle(self) -> None:
        """Do not wait for steps in flight whose requests have all ended."""
        if self.in_flight and not any(self.scheduler.serves(one.scheduled) for one in self.in_flight):
            self.discard()

    def discard(self) -> None:
        """Forget all steps in flight; what is left of their requests is scheduled again."""
        for one in self.in_flight:
            self.runner.drop(one.step)
        self.in_flight.clear()
        if self.scheduler.in_flight:
            self.scheduler.discard(self.scheduler.in_flight[0])

    def _launch(self) -> bool:
        """Schedule a step and launch it; False if there is none to run before the results of the step in flight."""
        ahead = bool(self.in_flight)
        asked = False
        if self.speculator is not None:
            if not ahead:
                asked = self.speculator.propose()
            elif self.in_flight[-1].scheduled.has_drafts or self.speculator.waits():
                return False
        begin = time.monotonic()
        scheduled = self.scheduler.schedule()
        if not ahead:
            self.last_step = scheduled
        if not scheduled.entries:
            return False
        self.scheduler.commit(scheduled)
        try:
            sampling = scheduled.sampling()
            rows = self._sampling_rows(sampling)
            if scheduled.has_drafts:
                pairs = zip(sampling, rows, strict=True)
                rows = [row for entry, first in pairs for row in sampling_rows(entry, first)]
            parts = prompt_parts(scheduled.entries, self._prompts) if self._prompts else {}
            step = self.runner.launch(scheduled.entries, rows, parts)
        except BaseException:
            self.discard()
            raise
        prompts = {name: (self._prompts[name], part) for name, part in parts.items()}
        self.in_flight.append(_InFlight(scheduled, step, begin, prompts, ahead, asked))
        if not ahead:
            self._complete()
        return True

    def _verify(self, speculator: Speculator, one: _InFlight, drawn: Sequence[int]) -> list[list[int]]:
        """The new tokens of each entry that samples. Where steps without drafts run ahead, asking for drafts costs that, also where there are
        none: what is compared is steps before which the proposer is asked, and those that run ahead."""
        alone = self.depth == 1
        drafting = one.scheduled.has_drafts if alone else one.asked
        return speculator.verify(one.scheduled, drawn, drafting, usual=alone or drafting or one.ahead)

    def _complete(self) -> None:
        """Launch what is left of the oldest step, all results before which are there."""
        try:
            self.runner.complete(self.in_flight[0].step)
        except BaseException:
            self.discard()
            raise
