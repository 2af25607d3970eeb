"""Any interleaving of arrivals, steps, aborts, pauses and failures with drafts ends each request once, with the ids of the fake model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.runtime.engine import Engine
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.speculation import DraftRequest
from gristmill.runtime.speculation import speculator as speculator_module
from gristmill.runtime.speculation.config import Speculation
from tests.runtime.draft_sources import Source, use
from tests.runtime.fake_runner import FakeRunner, fake_engine
from tests.runtime.scheduler.harness import VOCAB, expected_ids


class Failure(Exception):
    """A step of the fake runner, or of the proposer."""


def life(seed: int, async_steps: bool) -> tuple[int, int]:
    """Runs an engine with a random life to its end; returns the drafts that were verified, and those that were accepted."""
    rng = random.Random(seed)
    speculate = Speculation("ngram", rng.randint(1, 6), adaptive=rng.random() < 0.5)
    engine, runner = fake_engine(
        async_steps,
        speculate,
        num_blocks=rng.choice((9, 16, 64)),
        max_seqs=rng.randint(1, 5),
        max_batch_tokens=rng.randint(8, 40),
        max_chunk=rng.choice((None, 3)),
        prefix_caching=rng.random() < 0.7,
    )
    capacity = engine.scheduler.config.capacity

    def draft(_: list[int], count: int, request: DraftRequest) -> list[int]:
        if rng.random() < 0.03:
            raise Failure
        drafts = expected_ids(request.tokens, rng.randint(0, count + 2))
        if drafts and rng.random() < 0.4:
            drafts[rng.randrange(len(drafts))] = rng.randrange(-1, VOCAB + 1)
        return drafts

    def sometimes_fail() -> None:
        if rng.random() < 0.05:
            raise Failure

    runner.before_step = sometimes_fail
    use(engine, Source({}, draft))
    prompts: dict[str, tuple[list[int], SamplingParams]] = {}
    outputs: dict[str, list[int]] = {}
    ended: dict[str, str] = {}

    def collect(some: Any) -> None:
        for output in some:
            assert output.id not in ended, "a request ended twice, or went on"
            outputs[output.id] += output.new_ids
            if output.finish_reason is not None:
                ended[output.id] = output.finish_reason.value

    arrivals = 12
    while arrivals or engine.has_unfinished():
        action = rng.random()
        if arrivals and action < 0.25:
            arrivals -= 1
            name = f"r{arrivals}"
            prompt = [rng.randrange(4) for _ in range(rng.randint(1, 20))]
            params = SamplingParams(max_tokens=rng.randint(1, 15), stop_token_ids=rng.sample(range(VOCAB), 3))
            prompts[name], outputs[name] = (prompt, params), []
            engine.add_request(name, prompt, params)
        elif action < 0.28 and prompts:
            collect(engine.abort([rng.choice([*prompts])]))
        elif action < 0.3:
            engine.pause(rng.choice(("wait", "keep")))
        elif action < 0.45:
            engine.resume()
        elif not engine.paused:
            try:
                collect(engine.step())
            except Failure:
                engine.scheduler.check()
    assert engine.scheduler.pool.num_referenced == 0 and ended.keys() == prompts.keys()
    for name, (prompt, params) in prompts.items():
        whole = expected_ids(prompt, params.max_tokens, params.stop_token_ids, capacity)
        assert outputs[name] == (whole[: len(outputs[name])] if ended[name] == "abort" else whole), name
    return counts(engine)


def counts(engine: Engine) -> tuple[int, int]:
    assert engine.speculator is not None
    status = engine.speculator.status()
    return status.draft_tokens, status.accepted_tokens


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_any_life(seed: int, async_steps: bool) -> None:
    life(seed, async_steps)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_many_lives(seed: int, async_steps: bool) -> None:
    life(seed, async_steps)


def test_lives_accept_and_reject_drafts() -> None:
    drafts, accepted = map(sum, zip(*(life(seed, True) for seed in range(25)), strict=True))
    assert 0.2 * drafts < accepted < 0.9 * drafts and drafts > 300


def test_a_run_that_reads_a_rejected_row_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: one id too many is taken from each rejected run."""
    accepted_runs = speculator_module.accepted_runs

    def greedy(entries: Any, drawn: Any) -> Any:
        runs, first = accepted_runs(entries, drawn), 0
        for entry, run in zip(entries, runs, strict=True):
            if len(run) <= entry.drafts:
                run.append(drawn[first + len(run)])
            first += 1 + entry.drafts
        return runs

    monkeypatch.setattr(speculator_module, "accepted_runs", greedy)
    with pytest.raises((ValueError, AssertionError)):
        for seed in range(10):
            life(seed, False)


def test_a_draft_that_is_computed_as_another_token_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the last draft of each run is replaced before the step is computed."""
    launch = FakeRunner.launch

    def shifted(self: FakeRunner, entries: Any, *others: Any) -> Any:
        step = launch(self, entries, *others)
        for entry in step.plan.entries:
            if entry.drafts:
                entry.tokens = [*entry.tokens[:-1], (entry.tokens[-1] + 1) % VOCAB]
        return step

    monkeypatch.setattr(FakeRunner, "launch", shifted)
    with pytest.raises((ValueError, AssertionError)):
        for seed in range(10):
            life(seed, False)
