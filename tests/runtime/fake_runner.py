"""A runner without a model: the scheduler's fake model behind the interface of `Runner`, with failures and
hangs on request. It computes as late as a device may: a step runs when its ids are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from gristmill.runtime.engine import Engine
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest, ScheduledStep, SchedulerConfig
from gristmill.runtime.speculation.config import Speculation
from gristmill.runtime.step_details import StepResult
from tests.runtime.processed import cpu_plans
from tests.runtime.scheduler.harness import VOCAB, FakeModel


@dataclass
class LateStep:
    """A step that was launched; ids: None until it has run. completed: whether the rest of it was launched."""

    plan: ScheduledStep
    ids: list[Any] | None = None
    dropped: bool = False
    completed: bool = False


def _copied(entry: ScheduledRequest) -> ScheduledRequest:
    copied = copy(entry)
    copied.block_ids = list(entry.block_ids)
    return copied


class FakeRunner:
    """before_step: called before each step is launched; an exception that it raises is the step's failure. before_collect: likewise
    when its ids are asked for."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.model = SimpleNamespace(
            config=SimpleNamespace(vocab_size=VOCAB, eos_ids=()), plans=SimpleNamespace(late=0)
        )
        self.cache = SimpleNamespace(
            num_blocks=config.num_blocks, block_size=config.block_size, windows=config.windows
        )
        self.processors = LogitsProcessors(VOCAB, cpu_plans())
        self.fake = FakeModel(config)
        self.max_seqs = config.max_seqs
        self.device = torch.device("cpu")
        self.before_step: Callable[[], None] = lambda: None
        self.before_complete: Callable[[], None] = lambda: None
        self.before_collect: Callable[[], None] = lambda: None
        self.graph_bytes = 0
        self.steps = 0
        self.most_in_flight = 0
        self._launched: list[LateStep] = []

    def launch(
        self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow], prompts: object = None
    ) -> LateStep:
        self.before_step()
        assert all(step.completed or step.dropped for step in self._launched), "launched into a step"
        self.steps += 1
        sampling = [entry for entry in entries if entry.samples]
        assert len(rows) == sum(1 + entry.drafts for entry in sampling)
        copies = [_copied(entry) for entry in entries]
        step = LateStep(ScheduledStep(0, copies, sum(entry.count for entry in entries)))
        self._launched.append(step)
        in_flight = sum(not step.dropped for step in self._launched)
        self.most_in_flight = max(self.most_in_flight, in_flight)
        return step

    def complete(self, step: LateStep) -> None:
        """The results of all steps before must be there."""
        self.before_complete()
        in_flight = [one for one in self._launched if not one.dropped]
        assert in_flight[0] is step, "the rest of a step was launched before the results of another"
        step.completed = True

    def collect(self, step: LateStep) -> StepResult:
        self.before_collect()
        self._run_to(step)
        assert step.completed, "a step was collected whose rest was not launched"
        assert step.ids is not None and not step.dropped
        return StepResult(step.ids)

    def expect_drafts(self, most: int) -> None:
        """Any number will do."""

    def drop(self, step: LateStep) -> None:
        step.dropped = True  # the device runs it all the same

    def _run_to(self, step: LateStep) -> None:
        """The device runs steps in the order in which they were launched, those that were dropped, too."""
        while step.ids is None:
            first = self._launched.pop(0)
            runs = self.fake.run(first.plan)
            first.ids = [
                token
                for entry, run in zip(first.plan.sampling(), runs, strict=True)
                for token in drawn(entry, run)
            ]


def drawn(entry: ScheduledRequest, run: int | list[int]) -> list[int]:
    """Returns an id for each row of an entry: the accepted run, then poison that nobody may read."""
    ids = [run] if isinstance(run, int) else run
    return ids + [1 << 60] * (1 + entry.drafts - len(ids))


def fake_engine(
    async_steps: bool = True, speculate: Speculation | None = None, **options: Any
) -> tuple[Engine, FakeRunner]:
    """Returns an engine over a fake runner, and the runner; options: of its SchedulerConfig."""
    config = SchedulerConfig(
        **{"num_blocks": 64, "block_size": 4, "max_batch_tokens": 64, "max_seqs": 8, **options}
    )
    runner = FakeRunner(config)
    engine = Engine.from_parts(runner, config, speculate=speculate, async_steps=async_steps)  # type: ignore[arg-type]
    return engine, runner
