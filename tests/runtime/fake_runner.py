"""A runner without a model: the scheduler's fake model behind the interface of `Runner`, with failures and
hangs on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from gristmill.runtime.engine import Engine
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest, SchedulerConfig, StepPlan
from tests.runtime.scheduler.harness import VOCAB, FakeModel


class FakeRunner:
    """before_step: called before each step; an exception that it raises is the step's failure."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB, eos_ids=()))
        self.cache = SimpleNamespace(num_blocks=config.num_blocks, block_size=config.block_size)
        self.processors = LogitsProcessors(VOCAB, torch.device("cpu"))
        self.fake = FakeModel(config)
        self.before_step: Callable[[], None] = lambda: None
        self.steps = 0

    def run(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> list[Any]:
        self.before_step()
        self.steps += 1
        return self.fake.run(StepPlan(0, list(entries), sum(entry.count for entry in entries)))


def fake_engine(**options: Any) -> tuple[Engine, FakeRunner]:
    """Returns an engine over a fake runner, and the runner; options: of its SchedulerConfig."""
    config = SchedulerConfig(
        **{"num_blocks": 64, "block_size": 4, "max_batch_tokens": 64, "max_seqs": 8, **options}
    )
    runner = FakeRunner(config)
    return Engine.from_parts(runner, config), runner  # type: ignore[arg-type]
