"""Asynchronous steps give the ids of synchronous ones, although a step is launched before the ids of the step before it are known."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.runtime import engine_loading
from gristmill.runtime.decode_graphs import DecodeGraphs
from gristmill.runtime.engine import Engine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import Sampler, SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import FinishReason, ScheduledRequest, SchedulerConfig
from gristmill.runtime.steps_in_flight import LaunchedStep, SampledTokens, StepRing
from gristmill.runtime.structured_output import StructuredOutput
from tests.runtime import oracle
from tests.runtime.fake_runner import FakeRunner, fake_engine
from tests.runtime.late_runner import LateRunner
from tests.runtime.oracle import DEEPSEEK, LLAMA
from tests.runtime.scheduler.harness import expected_ids

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_tokens=17, temperature=1.2, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=1, temperature=1.0, seed=8),
]


def prompts(count: int = 7) -> list[list[int]]:
    """Prompts of different lengths, some with a common prefix."""
    tokens = oracle.eval_tokens()
    return [
        tokens[:40] + tokens[50 * n : 50 * n + n] if n % 2 else tokens[70 * n : 70 * n + 3 + n]
        for n in range(1, count + 1)
    ]


@pytest.fixture
def make_late(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Returns an LLM with asynchronous steps, on a device that computes them as late as it may."""

    def build(name: str, runner: type[Runner] = LateRunner, **options: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr(engine_loading, "Runner", runner)
            return make(name, async_steps=True, **options)

    return build


def count_steps_ahead(llm: LLM) -> list[int]:
    """A list that gets the number of tokens which are on the device only, for each step that is launched from now on."""
    counts: list[int] = []
    launch = llm.engine.runner.launch

    def counted(entries: list[ScheduledRequest], *others: Any) -> LaunchedStep:
        counts.append(sum(entry.tokens is None for entry in entries))
        return launch(entries, *others)

    llm.engine.runner.launch = counted  # type: ignore[method-assign, assignment]
    return counts


PLAIN: dict[str, Any] = {}
TINY_POOL = {"num_blocks": 9, "max_seqs": 4}
CHUNKS = {"max_chunk": 8, "max_seqs": 3}
ONE_BY_ONE = {"enable_prefix_cache": False, "block_size": 5, "max_seqs": 1}
QUICK = [(LLAMA, PLAIN, True), (DEEPSEEK, PLAIN, False), (LLAMA, CHUNKS, False), (LLAMA, TINY_POOL, True)]


@pytest.mark.parametrize(
    ("name", "options", "graphs"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product(
            (LLAMA, DEEPSEEK), (PLAIN, TINY_POOL, CHUNKS, ONE_BY_ONE), (False, True)
        )
    ],
)
def test_same_ids(
    make: Callable[..., LLM], make_late: Callable[..., LLM], name: str, options: dict[str, Any], graphs: bool
) -> None:
    params = [PARAMS[i % 5] for i in range(7)]
    expected = make(name, decode_graphs=graphs, **options).generate(prompts(), params)
    late = make_late(name, decode_graphs=graphs, **options)
    counts = count_steps_ahead(late)
    preempted: list[str] = []
    commit = late.engine.scheduler.commit
    late.engine.scheduler.commit = lambda plan: (preempted.extend(plan.preempted), commit(plan))  # type: ignore[method-assign]
    for _ in range(2):  # also with what the prefix cache kept
        assert late.generate(prompts(), params) == expected
        late.engine.scheduler.check()
    assert sum(counts) > 60 and bool(preempted) == (options.get("num_blocks") == 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize("batch", [1, 2, 9, 33, 64])
def test_same_ids_at_batches(
    make: Callable[..., LLM], make_late: Callable[..., LLM], name: str, batch: int
) -> None:
    options = {"decode_graphs": True, "max_seqs": 64, "num_blocks": 400}
    params = [PARAMS[i % 5] for i in range(batch)]
    expected = make(name, **options).generate(prompts(batch), params)
    assert make_late(name, **options).generate(prompts(batch), params) == expected


DETAILED = [
    SamplingParams(max_tokens=12, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=30, frequency_penalty=0.7),
    SamplingParams(max_tokens=9, temperature=1.0, seed=1, logprobs=2),
    SamplingParams(max_tokens=8, prompt_logprobs=1, logit_bias={40: 4.0}),
    SamplingParams(max_tokens=20, temperature=0.9, seed=2, bad_words=[[5], [6, 7]], min_tokens=3),
    SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=16, presence_penalty=1.0, stop=["e"]),
]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("options", [PLAIN, TINY_POOL], ids=["plain", "preemption"])
def test_penalties_and_logprobs_do_not_wait(
    make: Callable[..., LLM], make_late: Callable[..., LLM], graphs: bool, options: dict[str, Any]
) -> None:
    """All steps run ahead, with the results of synchronous ones, bit for bit."""
    expected = make(LLAMA, decode_graphs=graphs, **options).generate(prompts(), DETAILED)
    late = make_late(LLAMA, decode_graphs=graphs, **options)
    counts = count_steps_ahead(late)
    for _ in range(2):
        assert late.generate(prompts(), DETAILED) == expected
    decoded = 2 * sum(len(one.token_ids) - 1 for one in expected)
    assert sum(counts) > decoded * (0.6 if options else 0.9)


DATE = StructuredOutput(regex=r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9](, 20[0-9]{2}){1,5}")
LIST = StructuredOutput(
    json_schema={"type": "array", "items": {"enum": ["a", "bcd", 17]}, "minItems": 2, "maxItems": 9}
)
WITH_GRAMMARS = [
    SamplingParams(max_tokens=40, structured_output=DATE, temperature=1.0, seed=1),
    SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=40, structured_output=LIST, logprobs=2, frequency_penalty=0.4),
    SamplingParams(max_tokens=25, repetition_penalty=1.3, logprobs=1),
    SamplingParams(max_tokens=3, structured_output=LIST, n=2),
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=40, structured_output=DATE, prompt_logprobs=1),
]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("options", [PLAIN, TINY_POOL], ids=["plain", "preemption"])
def test_grammars_do_not_wait(
    make: Callable[..., LLM], make_late: Callable[..., LLM], graphs: bool, options: dict[str, Any]
) -> None:
    """Every step is launched before the tokens that its grammars must know, with the results of synchronous steps, bit for bit."""
    pytest.importorskip("llguidance")
    expected = make(LLAMA, decode_graphs=graphs, **options).generate(prompts(), WITH_GRAMMARS)
    late = make_late(LLAMA, decode_graphs=graphs, **options)
    counts = count_steps_ahead(late)
    assert late.generate(prompts(), WITH_GRAMMARS) == expected
    assert sum(counts) > sum(len(one.token_ids) - 1 for one in expected) * (0.6 if options else 0.9)
    assert re.fullmatch(DATE.regex or "", expected[0].text) and not late.engine.runner.processors


class Incomplete(LateRunner):
    """Planted fault: rows with grammars keep the ids of the first part of their step."""

    def complete(self, step: LaunchedStep) -> None:
        if step.details is not None and step.details.waits:
            step.details.prepare_rest()


class Early(LateRunner):
    """Planted fault: rows with grammars are completed before the token that they are fed is known."""

    def launch(self, *arguments: Any) -> LaunchedStep:
        step = super().launch(*arguments)
        self.complete(step)
        return step


@pytest.mark.parametrize("fault", [Incomplete, Early])
def test_a_grammar_that_does_not_know_the_last_token_shows(
    make: Callable[..., LLM], make_late: Callable[..., LLM], fault: type[Runner]
) -> None:
    pytest.importorskip("llguidance")
    expected = make(LLAMA).generate(prompts(1), WITH_GRAMMARS[0])
    assert make_late(LLAMA, fault).generate(prompts(1), WITH_GRAMMARS[0]) != expected


def test_requests_that_end_between_the_parts_of_a_step(
    make: Callable[..., LLM], make_late: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with grammars are aborted while a step of theirs is half launched; another request takes the id, and steps fail."""
    pytest.importorskip("llguidance")
    [expected] = make(LLAMA).generate(prompts(1), WITH_GRAMMARS[2])
    late = make_late(LLAMA)
    engine, draw, calls = late.engine, Sampler.draw, itertools.count(1)

    def failing(self: Sampler, logits: Tensor, sampling: Any, ids: Tensor) -> None:
        if next(calls) % 7 == 0:
            raise MemoryError("planted")
        draw(self, logits, sampling, ids)

    monkeypatch.setattr(Sampler, "draw", failing)
    monkeypatch.setattr(DecodeGraphs, "record", DecodeGraphs.compute)  # a replay does not call it
    wish = WITH_GRAMMARS[2]
    ids: list[int] = []
    for life in range(4):
        [grammar] = late.compile_grammars(wish)
        plain = replace(wish, structured_output=None)
        engine.add_request("a", prompts(1)[0], plain, grammar=grammar)
        engine.add_request("b", prompts(2)[1], SamplingParams(max_tokens=50, ignore_eos=True))
        ids.clear()
        steps = 0
        while engine.has_unfinished() and (life == 3 or steps < 3 + life):
            try:
                outputs = engine.step()
            except MemoryError:
                continue
            steps += 1
            ids += [token for output in outputs if output.id == "a" for token in output.new_ids]
            engine.scheduler.check()
        engine.abort()
    assert tuple(ids) == expected.token_ids and not engine.runner.processors


class OneSlot(StepRing):
    """Planted fault: the inputs of a step are written over those of the step in flight."""

    def take(self, count: int) -> LaunchedStep:
        step = super().take(count)
        step.slot = 0
        return step


class NoFeedback(SampledTokens):
    """Planted fault: sampled ids do not come to the rows."""

    def write(self, rows: Tensor, ids: Tensor) -> None:
        super().write(rows, torch.zeros_like(ids))


class NextRow(SampledTokens):
    """Planted fault: a step reads the row of another request."""

    def read(self, rows: Tensor) -> Tensor:
        return super().read(rows.roll(1))


class Uncounted(LateRunner):
    """Planted fault: a penalty does not count the token that the host has not seen."""

    def launch(self, entries: Any, rows: Any, prompts: Any = None) -> LaunchedStep:
        step = super().launch(entries, rows, prompts or {})
        if step.details is not None and step.details._processed:
            [rows] = step.details._processed
            process = rows.process
            rows.process = lambda logits, fed, arrays: process(logits, torch.zeros_like(fed), arrays)  # type: ignore[method-assign]
        return step


def test_a_token_that_is_not_counted_shows(make: Callable[..., LLM], make_late: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=20, frequency_penalty=1.0, ignore_eos=True)
    expected = make(LLAMA).generate(prompts(), params)
    assert make_late(LLAMA, Uncounted).generate(prompts(), params) != expected


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fault", [OneSlot, NoFeedback, NextRow])
def test_planted_faults_show(
    make: Callable[..., LLM], make_late: Callable[..., LLM], fault: type, graphs: bool
) -> None:
    class Faulty(LateRunner):
        ring = fault if issubclass(fault, StepRing) else LateRunner.ring
        sampled = fault if issubclass(fault, SampledTokens) else LateRunner.sampled

    if fault is OneSlot and not graphs:
        return  # other steps take new memory from torch, which knows when it is free
    params = [PARAMS[i % 5] for i in range(7)]
    expected = make(LLAMA, decode_graphs=graphs).generate(prompts(), params)
    try:
        actual = make_late(LLAMA, Faulty, decode_graphs=graphs).generate(prompts(), params)
    except IndexError:
        return  # a token that was overwritten is outside the vocabulary
    assert actual != expected


def test_a_third_step_is_refused(make: Callable[..., LLM]) -> None:
    runner = make(LLAMA).engine.runner
    entries = [ScheduledRequest("a", 0, 2, True, [7, 8], [0], [], 0, 0)]
    rows = [SamplingRow(SamplingParams(), 0, 0)]
    first, second = runner.launch(entries, rows), runner.launch(entries, rows)
    with pytest.raises(RuntimeError, match="2 steps are in flight: collect or drop the oldest one first"):
        runner.launch(entries, rows)
    assert runner.collect(first) == runner.collect(second)
    runner.drop(runner.launch(entries, rows))
    assert len(runner.run(entries, rows)) == 1


@pytest.mark.parametrize("graphs", [False, True])
def test_a_row_without_a_result_ends_its_request_alone(
    make: Callable[..., LLM],
    make_late: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
) -> None:
    """The step that follows is in flight already, and computes the failed row, too."""
    expected = make(LLAMA, decode_graphs=graphs).generate(prompts(3), PARAMS[0])
    late = make_late(LLAMA, decode_graphs=graphs)
    draw, calls = Sampler.draw, iter(range(1000))

    def failing(self: Sampler, logits: Tensor, sampling: Any, ids: Tensor) -> None:
        draw(self, logits, sampling, ids)
        if next(calls) == 5:
            ids[1] = -1

    monkeypatch.setattr(Sampler, "draw", failing)
    monkeypatch.setattr(DecodeGraphs, "record", DecodeGraphs.compute)  # a replay does not call it
    results = late.generate(prompts(3), PARAMS[0])
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert results[0] == expected[0] and results[2] == expected[2]
    assert results[1].token_ids == expected[1].token_ids[:5]
    late.engine.scheduler.check()


@pytest.mark.parametrize("graphs", [False, True])
def test_a_failure_discards_what_is_in_flight(
    make: Callable[..., LLM],
    make_late: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
) -> None:
    """Every seventh step fails on the device, where it is known late; its requests go on from what they had."""
    expected = make(LLAMA, decode_graphs=graphs).generate(prompts(), PARAMS[2])
    engine = make_late(LLAMA, decode_graphs=graphs).engine
    draw, calls = Sampler.draw, iter(range(1000))

    def failing(self: Sampler, logits: Tensor, sampling: Any, ids: Tensor) -> None:
        if next(calls) % 7 == 6:
            raise MemoryError("planted")
        draw(self, logits, sampling, ids)

    monkeypatch.setattr(Sampler, "draw", failing)
    monkeypatch.setattr(DecodeGraphs, "record", DecodeGraphs.compute)  # a replay does not call it
    actual: dict[str, list[int]] = {}
    failures = 0
    for place, prompt in enumerate(prompts()):
        engine.add_request(str(place), prompt, PARAMS[2])
    while engine.has_unfinished():
        try:
            outputs = engine.step()
        except MemoryError:
            failures += 1
            assert engine.scheduler.in_flight == []
        else:
            for output in outputs:
                actual.setdefault(output.id, []).extend(output.new_ids)
        engine.scheduler.check()
    assert failures > 1
    assert [tuple(actual[str(place)]) for place in range(7)] == [result.token_ids for result in expected]


def test_a_step_returns_the_outputs_of_one_step() -> None:
    """The first call launches two steps and returns the outputs of one; a request that comes then is in the third step."""
    engine, runner = fake_engine(async_steps=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    (output,) = engine.step()
    assert list(output.new_ids) == expected_ids([1, 2, 3], 1) and runner.steps == 2
    engine.add_request("b", [4, 5], SamplingParams(max_tokens=2))
    assert [output.id for output in engine.step()] == ["a"] and runner.steps == 3
    assert [output.id for output in engine.step()] == ["a", "b"]
    assert [output.id for output in engine.step()] == ["a", "b"]
    assert runner.most_in_flight == 2 and not engine.has_unfinished() and engine.step() == []
    synchronous, runner = fake_engine(async_steps=False)
    synchronous.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    synchronous.step()
    assert runner.steps == runner.most_in_flight == 1


@pytest.mark.parametrize(("device", "depth"), [("cuda", 2), ("cpu", 1)])
def test_they_are_the_default_on_gpus(device: str, depth: int) -> None:
    """Whichever process launches the steps: the driver of ranks knows the type of their devices."""
    config = SchedulerConfig(num_blocks=64, block_size=4, max_batch_tokens=64, max_seqs=8)
    runner = FakeRunner(config)
    runner.model = SimpleNamespace(plans=SimpleNamespace(device=torch.device(device)))  # type: ignore[attr-defined]
    engine = Engine.from_parts(runner, config)  # type: ignore[arg-type]
    assert engine._pipeline.depth == depth


def test_nothing_is_waited_for_when_all_have_ended() -> None:
    """The step that follows an end token, or an abort, is not collected."""
    engine, runner = fake_engine(async_steps=True)
    ids = expected_ids([1, 2, 3], 3)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=9, stop_token_ids=ids[2:]))
    taken = [token for _ in range(3) for output in engine.step() for token in output.new_ids]
    assert taken == ids and runner.steps == 4 and engine.paused is False and not engine._pipeline.in_flight
    engine.add_request("b", [1], SamplingParams(max_tokens=9))
    engine.step()
    assert [output.finish_reason for output in engine.abort()] == [FinishReason.ABORT]
    assert not engine._pipeline.in_flight and engine.step() == []
    engine.scheduler.check()


@pytest.fixture
def paused() -> Iterator[Engine]:
    engine, _ = fake_engine(async_steps=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=6))
    engine.step()
    yield engine
    engine.resume()
    actual = [token for _ in range(9) for output in engine.step() for token in output.new_ids]
    assert actual == expected_ids([1, 2, 3], 6)[2:]


def test_a_pause_takes_the_outputs_in_flight(paused: Engine) -> None:
    paused.pause("keep")
    assert not paused.paused
    assert [list(output.new_ids) for output in paused.step()] == [expected_ids([1, 2, 3], 2)[1:]]
    assert paused.paused and paused.step() == []


def test_what_an_engine_refuses(make: Callable[..., LLM]) -> None:
    with pytest.raises(UsageError, match="async_steps must be True, False or None, got 3"):
        make(LLAMA, async_steps=3)
    llm = make(LLAMA, max_seqs=4)
    assert llm.engine._pipeline.depth == 1  # by default: on a CPU nothing would overlap
    config = make(LLAMA, max_seqs=5).engine.scheduler.config
    with pytest.raises(UsageError, match="rows for 4 requests, and max_seqs of the scheduler is 5"):
        Engine.from_parts(llm.engine.runner, config)
