"""Warm-up: afterwards no step within the engine's limits selects a kernel or makes a decode graph, and outputs are those without it."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.autotune import compilations
from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.worker import Worker
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import bucket_index
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.select import NoKernelError
from gristmill.runtime.decode_graphs import DecodeGraphs
from gristmill.runtime.engine import Engine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel.mesh import Mesh
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.speculation.config import Speculation
from gristmill.runtime.warm_up import WarmUp, warm_up
from tests.runtime.fake_runner import fake_engine
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

PHASES = ["selection", "verification", "compilation", "graphs"]
LIMITS = {"num_blocks": 40, "max_batch_tokens": 90, "max_seqs": 6, "max_model_len": 600}


@contextmanager
def nothing_is_made() -> Iterator[list[str]]:
    """Collects the kernels that are selected and the decode graphs that are made."""
    made: list[str] = []
    bind, make = BoundPlan._bind, DecodeGraphs._make

    def counted_bind(plan: BoundPlan, index: int) -> object:
        made.append(f"{plan.static} bucket {index}")
        return bind(plan, index)

    def counted_make(graphs: DecodeGraphs, seqs: int, bound: int, per_seq: int) -> object:
        made.append(f"graph {seqs} of {per_seq} {bound}")
        return make(graphs, seqs, bound, per_seq)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundPlan, "_bind", counted_bind)
        patch.setattr(DecodeGraphs, "_make", counted_make)
        yield made


def serve(engine: Engine, seed: int) -> dict[str, list[int]]:
    """Requests of random lengths that arrive while others run; returns their outputs by id."""
    outputs: dict[str, list[int]] = {}
    draw, left = random.Random(seed), 14
    while left or engine.has_unfinished():
        if left and draw.random() < 0.4:
            name, left = f"r{left}", left - 1
            prompt = [draw.randrange(5, 200) for _ in range(draw.choice((1, 3, 17, 40, 120, 300, 560)))]
            greedy = draw.random() < 0.5
            params = SamplingParams(
                max_tokens=draw.randrange(1, 20),
                temperature=0 if greedy else 0.9,
                seed=left,
                repetition_penalty=1.0 if draw.random() < 0.8 else 1.2,
                ignore_eos=True,
                prompt_logprobs=1 if left % 5 == 0 else None,
            )
            engine.add_request(name, prompt, params)
            outputs[name] = []
        for output in engine.step():
            outputs[output.id] += output.new_ids
    return outputs


@pytest.mark.parametrize(
    ("model", "graphs"),
    [
        (LLAMA, True),
        (DEEPSEEK, False),
        pytest.param(LLAMA, False, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, True, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_selected_while_serving(model: str, graphs: bool, make_apart: Callable[..., LLM]) -> None:
    engine = make_apart(model, decode_graphs=graphs, **LIMITS).engine
    stages: list[tuple[str, int, int]] = []
    report = engine.warm_up(lambda *progress: stages.append(progress))
    assert list(report.seconds) == PHASES and report.kernels > 20 and report.ran
    assert (report.graphs > 3) == graphs
    assert {stage for stage, done, total in stages if done == total} == set(report.seconds)
    assert engine.warm_up() is report  # there is nothing left to do
    with nothing_is_made() as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        served = [serve(engine, seed) for seed in range(2)]
    # Steps with processed logits have graphs of their own, which end with the logits: captured when one is needed.
    assert [one for one in made if not one.endswith("False")] == []
    assert engine.status().late_kernels == 0
    cold = make_apart(model, decode_graphs=graphs, **LIMITS).engine
    assert [serve(cold, seed) for seed in range(2)] == served


@pytest.mark.slow
@pytest.mark.parametrize("covered", [True, False], ids=["covered", "planted: no verified steps"])
def test_verified_steps_are_covered(covered: bool, make_apart: Callable[..., LLM]) -> None:
    """Also those of the draft model, and with fewer drafts than the most."""
    speculate = Speculation("draft", 3, MODELS / LLAMA, adaptive=False)
    engine = make_apart(LLAMA, decode_graphs=True, speculate=speculate, **LIMITS).engine
    assert engine.speculator is not None and engine.speculator.proposer.runner is not None
    if covered:
        report = engine.warm_up()
        assert list(report.seconds) == [*PHASES, *(f"draft model: {name}" for name in PHASES)]
    else:
        warm_up(engine.runner, engine.scheduler.config)
        warm_up(engine.speculator.proposer.runner, engine.scheduler.config)
    with nothing_is_made() as made:
        served = serve(engine, 0)
    assert bool([one for one in made if not one.endswith("False")]) != covered
    assert served == serve(make_apart(LLAMA, **LIMITS).engine, 0)
    status = engine.status().speculation
    assert status is not None and status.accepted_tokens > 10


@pytest.mark.parametrize("fault", ["", "another kernel", "ranks"])
def test_steps_between_powers_of_two_run_where_they_are_needed(
    fault: str, make_apart: Callable[..., LLM], policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 80 tokens run if one of their kernels has not run for 64 or 96, the most; those of ranks always, so that none waits for another."""
    from gristmill.runtime import warm_up as module

    own = replace(policy, weight_memory=1.07 + 0.01 * len(fault))  # whose plans no other engine has used
    engine = make_apart(LLAMA, warm="off", policy=own, **LIMITS | {"max_batch_tokens": 96}).engine
    ran: list[int] = []
    run, code = module._launch_unpadded, BoundPlan._code

    def counted(runner: Runner, entries: list[ScheduledRequest], rows: list[SamplingRow]) -> None:
        if runner.model.plans._calls is None and any(entry.count > 1 for entry in entries):
            ran.append(sum(entry.count for entry in entries))
        run(runner, entries, rows)

    def other_code(plan: BoundPlan, index: int, *rest: Any) -> tuple[object, ...]:
        return (*code(plan, index, *rest), index == bucket_index(80) and plan.op.name == "linear")

    monkeypatch.setattr(module, "_launch_unpadded", counted)
    if fault == "another kernel":
        monkeypatch.setattr(BoundPlan, "_code", other_code)
    if fault == "ranks":
        monkeypatch.setattr(engine.runner.model.plans, "mesh", Mesh(rank=0, world=2))
    engine.warm_up()
    # A step that has run one of its kernels serves the others of its size.
    assert (
        ran.count(64) == ran.count(96) == 3
        and ran.count(80) == {"": 0, "another kernel": 1, "ranks": 3}[fault]
    )
    assert ran.index(96) < ran.index(80) if fault else True


@pytest.mark.parametrize("stage", ["prompts", "decode_steps", "samples"])
def test_each_stage_is_needed(
    stage: str, make_apart: Callable[..., LLM], policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a stage is left out, and what it covers is selected or captured while serving, with a warning for kernels."""
    from gristmill.runtime import warm_up

    monkeypatch.setattr(warm_up, f"_{stage}", lambda *arguments: iter(()))
    own = replace(policy, weight_memory=1.06 + 0.01 * len(stage))  # whose plans no other engine has used
    limits = LIMITS | {
        "num_blocks": 80
    }  # contexts of two bounds: prompts of a few tokens need graphs of the shorter one, too
    engine = make_apart(LLAMA, dtype="bf16", decode_graphs=True, policy=own, **limits).engine
    engine.warm_up()
    with nothing_is_made() as made, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        serve(engine, 0)
    late = [one for one in made if not one.endswith("False")]
    assert late
    selected = [one for one in late if not one.startswith("graph")]
    messages = [str(one.message) for one in caught if "was selected while serving" in str(one.message)]
    assert len(messages) == len(selected) == engine.status().late_kernels
    assert all("the warm-up did not cover it" in message for message in messages)


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize("planted", [False, True], ids=["recorded", "planted: nothing is recorded"])
def test_all_kernels_are_verified_before_a_step_runs(
    model: str,
    planted: bool,
    make_apart: Callable[..., LLM],
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gristmill.runtime import warm_up

    if planted:
        monkeypatch.setattr(warm_up, "_recorded", lambda *arguments: [])
    engine = make_apart(
        model, decode_graphs=True, policy=replace(policy, cache=str(tmp_path)), **LIMITS
    ).engine
    stages, verified, operations = ["selection"], [], []
    verify = Worker.verify

    def counted(worker: Worker, op: Op, *task: object) -> object:
        verified.append(stages[-1])
        operations.append(op.name)
        return verify(worker, op, *task)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "verify", counted)
    engine.warm_up(lambda stage, done, total: stages.append(stage))
    assert len(verified) > 5 and (set(verified) != {"verification"}) == planted
    # On a GPU these take longest to compile: if they came last, one process would work while the others wait.
    assert (operations[0] == "sample") != planted


@pytest.mark.parametrize("planted", [False, True], ids=["all", "planted: no prompts"])
def test_loading_warms_up(
    planted: bool,
    make_apart: Callable[..., LLM],
    policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine that nobody has warmed up selects nothing while it serves; planted: what a phase leaves out is noticed."""
    from gristmill.runtime import warm_up

    if planted:
        monkeypatch.setattr(warm_up, "_prompts", lambda *arguments: iter(()))
    own = replace(policy, weight_memory=1.31 + planted)  # whose plans no other engine has used
    with caplog.at_level("INFO"):
        engine = make_apart(LLAMA, warm="auto", policy=own, **LIMITS).engine
    report = engine.warmed
    assert report is not None and not report.ran and list(report.seconds) == ["weights", *PHASES[:-1]]
    assert f"{MODELS / LLAMA}: {report}" in caplog.messages
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        serve(engine, 0)
    late = [one for one in caught if "was selected while serving" in str(one.message)]
    assert bool(late) == planted and engine.status().late_kernels == len(late)


@pytest.mark.parametrize("warmed", [True, False], ids=["warmed", "not warmed"])
def test_what_triton_compiles_in_a_step_is_late(warmed: bool) -> None:
    """Without a warm-up nobody has promised anything."""
    engine, runner = fake_engine()
    engine.warmed = WarmUp({}, 0, 0) if warmed else None
    listener = compilations._Listener(None)
    events = iter([("a_kernel", False), ("another", True)])

    def compile_one() -> None:
        if (event := next(events, None)) is not None:
            listener(metadata={"name": event[0]}, cache_hit=event[1])

    runner.before_step = compile_one
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while engine.has_unfinished():
            engine.step()
    said = [str(one.message) for one in caught if "while serving" in str(one.message)]
    assert engine.late_kernels == 2 * warmed and bool(said) == warmed
    assert not warmed or "Triton compiled or loaded a_kernel" in said[0]


def test_warm_off_prepares_nothing(make_apart: Callable[..., LLM], policy: Policy) -> None:
    engine = make_apart(LLAMA, policy=replace(policy, weight_memory=1.52), warm="off", **LIMITS).engine
    assert engine.warmed is None and not any(any(p.entries) for p in engine.runner.model.plans.bound.values())
    serve(engine, 0)
    assert engine.status().late_kernels == 0
    with pytest.raises(UsageError, match="warm must be 'auto' or 'off', got 'on'"):
        make_apart(LLAMA, warm="on")


def test_a_warm_up_that_fails_leaves_no_engine(
    make_apart: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []

    def fail(*arguments: object) -> None:
        raise NoKernelError("no kernel for a size")

    monkeypatch.setattr("gristmill.runtime.warm_up._recorded", fail)
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    with pytest.raises(NoKernelError, match="no kernel for a size"):
        make_apart(LLAMA, warm="auto", **LIMITS)
    assert len(closed) == 1


def test_another_thread_serves_while_calls_are_recorded(make_apart: Callable[..., LLM]) -> None:
    """Models share plans: what one records, another still runs, prepared or not."""
    llm = make_apart(LLAMA)
    expected, outputs = llm.generate([[7, 8, 9]])[0].token_ids, []
    plans = llm.engine.runner.model.plans
    with plans.recorded() as calls:
        thread = threading.Thread(target=lambda: outputs.extend(llm.generate([[7, 8, 9]])))
        thread.start()
        thread.join()
    assert outputs[0].token_ids == expected and not calls


def test_it_needs_an_idle_engine(make_apart: Callable[..., LLM]) -> None:
    engine = make_apart(LLAMA, **LIMITS).engine
    engine.add_request("a", [7, 8, 9], SamplingParams(max_tokens=4))
    engine.step()
    with pytest.raises(UsageError, match="warm_up while requests have begun"):
        engine.warm_up()
    engine.abort()
    engine.sleep()
    with pytest.raises(UsageError, match="the engine sleeps: call wake_up"):
        engine.warm_up()


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 1, "block_size": 4, "max_batch_tokens": 1, "max_seqs": 1},
        {"num_blocks": 3, "block_size": 1, "max_batch_tokens": 300, "max_seqs": 300},
        {"num_blocks": 8, "max_chunk": 5, "max_batch_tokens": 33, "max_seqs": 7, "max_model_len": 9},
    ],
    ids=["one token", "tiny cache", "chunks"],
)
def test_small_limits(limits: dict[str, int], make_apart: Callable[..., LLM]) -> None:
    llm = make_apart(LLAMA, **limits)
    assert llm.engine.warm_up().kernels > 0
    llm.engine.scheduler.check()
    assert len(llm.generate([[7]], SamplingParams(max_tokens=1))[0].token_ids) == 1
