"""Decode steps over buffers that never move give the same ids as without, whatever the batch does. Capture
itself: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import chain, count, pairwise, product, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.autotune import bound
from gristmill.autotune.bound import BoundPlan
from gristmill.kernel_registry.kernel import Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.runtime import decode_graphs, graph_memory
from gristmill.runtime.completion import Completion
from gristmill.runtime.decode_graphs import DecodeGraph, DecodeGraphs
from gristmill.runtime.decode_inputs import Buffers
from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.layers.plans import Workspaces
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel.mesh import ALONE, Mesh
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_tokens=17, temperature=1.2, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_tokens=30),
]


@pytest.fixture(scope="module")
def expected(shared: Callable[..., LLM]) -> Callable[[str], list[Completion]]:
    """Of a model, without graphs and all at once; computed once."""
    prompts = wide({})["prompts"]
    params = [PARAMS[i % 4] for i in range(len(prompts))]

    def compute(name: str) -> list[Completion]:
        llm = shared(name, decode_graphs=False)
        completions = llm.generate(prompts, params)
        assert not llm.explain_graphs()
        return completions

    return cache(compute)


def both(make: Callable[..., LLM], name: str, **options: Any) -> list[LLM]:
    return [make(name, decode_graphs=on, **options) for on in (False, True)]


def wide(options: dict[str, Any]) -> dict[str, Any]:
    """Prompts with a common prefix, so that the prefix cache serves some of them."""
    start = oracle.eval_tokens()[:40]
    return {
        "prompts": [start + oracle.eval_tokens()[n : n + 7] for n in (100, 200, 300, 400)] + [start] * 3,
        **options,
    }


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 14, "max_seqs": 4},
        {"max_chunk": 8, "max_seqs": 3},
        {"enable_prefix_cache": False, "block_size": 5},
    ],
    ids=["plain", "preemption", "chunks", "odd blocks"],
)
def test_same_ids(
    make: Callable[..., LLM],
    expected: Callable[[str], list[Completion]],
    name: str,
    options: dict[str, Any],
) -> None:
    """Preemption, the prefix cache, and requests that come and go do not change the ids."""
    through = make(name, decode_graphs=True, **options)
    prompts = wide({})["prompts"]
    params = [PARAMS[i % 4] for i in range(len(prompts))]
    scheduler, preempted = through.engine.scheduler, []
    commit = scheduler.commit
    scheduler.commit = lambda plan: (preempted.extend(plan.preempted), commit(plan))  # type: ignore[method-assign]
    assert through.generate(prompts, params) == expected(name)
    decode = through.engine.runner.decode
    assert decode is not None and sum(g.steps for g in decode.graphs.values()) > 20
    if options.get("num_blocks") == 14:
        assert preempted


def test_least_graph_that_holds_the_step(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, decode_graphs=True)
    llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=4, ignore_eos=True))
    llm.generate([[1] * 510], SamplingParams(max_tokens=4, ignore_eos=True))
    rows = {(r["seqs"], r["max_ctx"]): r["steps"] for r in llm.explain_graphs() if r["seqs"]}
    assert rows == {(4, 512): 3, (1, 512): 2, (1, 4096): 1}
    (refused,) = [r for r in llm.explain_graphs() if not r["seqs"]]
    assert refused["reason"] == "a sequence has several new tokens" and refused["steps"] == 2


@pytest.mark.parametrize("fault", ["", "another kernel for one size", "none selected"])
def test_no_graphs_of_the_smallest_bound_where_attention_takes_any(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """That of all kernels that decode steps have; what is selected later changes nothing."""
    runner = make(LLAMA, decode_graphs=True, max_seqs=8).engine.runner
    assert isinstance(runner, Runner) and runner.decode is not None
    asked: list[tuple[str, int]] = []

    def takes(kernel: str, config: object, problem: Problem, max_q: int) -> bool:
        asked.append((problem.op, max_q))
        return len(asked) == 1 or not fault

    monkeypatch.setattr(decode_graphs, "takes_any_bound", takes)
    graphs = runner.decode
    plans = [plan for plan in graphs.model.plans.bound.values() if plan.op.name == "paged_attention"]
    assert len(plans) == 1
    if fault == "none selected":
        monkeypatch.setattr(plans[0], "entries", [None] * len(plans[0].entries))
    else:
        plans[0].prepare([1, 4])
    graphs.most_drafts = 2
    bounds = [graphs.bound(context) for context in (1, 512, 513, 4096, 4097)]
    assert bounds == [512 if fault else 4096] * 2 + [4096] * 2 + [graphs.bound(4097)]
    assert set(asked) <= {("paged_attention", 3)} and bool(asked) == (fault != "none selected")
    monkeypatch.setattr(decode_graphs, "takes_any_bound", lambda *_: bool(fault))
    plans[0].prepare([8])
    assert [graphs.bound(context) for context in (1, 513)] == bounds[1:3]


def test_a_wrong_slot_shows(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: an unused row writes to the cache instead of nowhere."""
    idle = Buffers._idle

    def careless(self: Buffers, slot: int, seqs: int, count: int) -> None:
        idle(self, slot, seqs, count)
        self.host[slot]["slots"][:, seqs:] = 5

    without, through = both(make, LLAMA)
    monkeypatch.setattr(Buffers, "_idle", careless)
    prompts = wide({})["prompts"]
    assert through.generate(prompts, PARAMS[0]) != without.generate(prompts, PARAMS[0])


def test_a_step_that_is_refused_says_why(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(LLAMA, decode_graphs=True)

    def refuse(self: DecodeGraphs, *key: Any) -> Any:
        graph = original(self, *key)
        graph.reason = "no graph can hold this kernel"
        return graph

    original = DecodeGraphs._make
    monkeypatch.setattr(DecodeGraphs, "_make", refuse)
    completions = llm.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    assert completions == make(LLAMA).generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    assert {
        "seqs": None,
        "tokens_per_seq": None,
        "max_ctx": None,
        "captured": False,
        "bytes": 0,
        "steps": 4,
        "reason": "no graph can hold this kernel",
    } in llm.explain_graphs()


class FakeCuda:
    """Streams and graphs on a CPU: capturing computes the step, as often as there is memory for it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        errors: dict[int, list[Exception]],
        free: Iterator[int] | None = None,
    ) -> None:
        """errors: by sequences, what their captures raise, one after the other. free: the free bytes, each time that somebody asks."""
        left = repeat(0) if free is None else free
        monkeypatch.setattr(graph_memory, "free_bytes", lambda _: next(left))
        monkeypatch.setattr(graph_memory, "total_bytes", lambda _: 1000)
        self.emptied, self.captured, self.ran = 0, list[int](), list[int]()
        monkeypatch.setattr(bound, "_capturing", lambda: self.capturing is not None)
        self.pools, self.used, self.ended = count(), set[int](), set[int]()
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(self.pools))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(decode_graphs, "capturing_on", self.capturing_on)
        compute = DecodeGraphs.compute

        def computed(graphs: DecodeGraphs, made: DecodeGraph) -> None:
            compute(graphs, made)
            if self.capturing:
                if left := errors.get(made.seqs):
                    raise left.pop(0)
                self.captured.append(made.seqs)
                replay = partial(compute, graphs, made)
                self.capturing.replay = lambda: replay()  # type: ignore[attr-defined]
            else:
                self.ran.append(made.seqs)

        self.capturing: SimpleNamespace | None = None
        monkeypatch.setattr(DecodeGraphs, "compute", computed)

    def wait_stream(self, other: Any) -> None:
        pass

    def empty_cache(self) -> None:
        self.emptied += 1

    @contextmanager
    def capturing_on(self, stream: Any, graph: Any, pool: int, **options: Any) -> Iterator[None]:
        """A pool ends when its only graph is not captured, as torch's do."""
        assert pool not in self.ended, "it->second->use_count > 0 INTERNAL ASSERT FAILED"
        self.capturing = graph
        try:
            yield
            self.used.add(pool)
        finally:
            self.capturing = None
            if pool not in self.used:
                self.ended.add(pool)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize("kind", ["torch", "driver", "end of the capture"])
def test_a_graph_without_memory_is_left_out(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Its steps run kernel by kernel, and it is said once."""
    error: Exception = NO_MEMORY if kind == "torch" else RuntimeError("CUDA error: out of memory")
    if kind == "end of the capture":  # which fails in turn
        error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
        error.__context__ = NO_MEMORY
    llm = make(LLAMA, decode_graphs=True)
    cuda = FakeCuda(monkeypatch, {1: [error, error], 4: [error, error], 2: [NO_MEMORY]})
    assert llm.engine.runner.decode is not None
    llm.engine.runner.decode._stream = cuda  # type: ignore[assignment]
    prompts = wide({})["prompts"][:4]
    params = [SamplingParams(max_tokens=8 * (1 + i), ignore_eos=True) for i in range(4)]
    results = llm.generate(prompts, params)
    assert results == make(LLAMA, decode_graphs=False).generate(prompts, params)
    rows = {row["seqs"]: row for row in llm.explain_graphs() if row["seqs"]}
    assert {seqs: row["captured"] for seqs, row in rows.items()} == {1: False, 2: True, 4: False}
    assert rows[1]["reason"] == rows[4]["reason"] == "there was no memory to capture it"
    refused = [
        row["steps"] for row in llm.explain_graphs() if row["seqs"] is None and "memory" in row["reason"]
    ]
    assert refused[0] > 10 and rows[2]["steps"] > 5
    assert (
        cuda.captured == [2] and cuda.emptied == 3 + 2
    )  # before each second attempt, and after those that failed
    assert cuda.ended and len(cuda.used) == 1
    [said] = [record for record in caplog.records if "no memory to capture" in record.message]
    assert "decode steps of 4 sequences" in said.message


@pytest.mark.parametrize("full", [True, False], ids=["bound", "memory"])
def test_a_graph_that_another_rank_has_not_is_given_up(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: bool
) -> None:
    """Two ranks that run a step in different ways would wait for each other forever. After one that was full no further graph is tried."""
    llm = make(LLAMA, decode_graphs=True, max_seqs=8)
    runner = llm.engine.runner
    assert isinstance(runner, Runner) and runner.decode is not None
    cuda, asked = FakeCuda(monkeypatch, {}), list[list[int]]()

    def agree(values: Sequence[int]) -> Sequence[int]:
        """The other rank cannot capture the second graph."""
        asked.append([*values])
        return values if len(asked) != 2 else [int(full), 0 if full else 1]

    monkeypatch.setattr(runner._graph_memory, "_agree", agree)
    runner.decode._stream = cuda  # type: ignore[assignment]
    for seqs in (1, 2, 4, 8):
        runner.decode.graph(seqs, 1)
    captured = [row["seqs"] for row in llm.explain_graphs() if row["captured"]]
    assert captured == ([1] if full else [1, 4, 8])
    assert asked == [[0, 0]] * (2 if full else 4)
    assert ("graph_memory allows" if full else "no memory to capture") in caplog.text


OUTCOMES = ("", graph_memory.NO_MEMORY, "a kernel cannot be captured", graph_memory.OVER_BOUND)


def settle(outcome: str, agree: Callable[[Sequence[int]], Sequence[int]]) -> tuple[str, bool]:
    """What a rank makes of the outcome of a capture, and whether it tries the next one."""
    rank = graph_memory.GraphMemory(10, torch.device("cpu"), agree)
    rank.add(11 if outcome == graph_memory.OVER_BOUND else 1)
    return rank.settled("" if outcome == graph_memory.OVER_BOUND else outcome), not rank.is_full


@pytest.mark.parametrize("outcomes", [*product(OUTCOMES, OUTCOMES)], ids=repr)
def test_ranks_agree_on_every_capture(outcomes: tuple[str, str]) -> None:
    """All have a graph or none, and all try the next one or none."""
    said = list[Sequence[int]]()
    for outcome in outcomes:
        settle(outcome, lambda values: (said.append(values), values)[1])
    most = [max(values) for values in zip(*said, strict=True)]
    (reason, next_one), (other, other_next) = (settle(outcome, lambda values: most) for outcome in outcomes)
    assert (reason == "") == (other == "") == (outcomes == ("", ""))
    assert next_one == other_next == (graph_memory.OVER_BOUND not in outcomes)


def test_what_other_processes_take_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device loses 9 GiB in a capture of 30 MiB: another process has begun to load a model."""
    free, own = iter((20 << 30, 11 << 30)), iter((0, 30 << 20))
    monkeypatch.setattr(graph_memory, "free_bytes", lambda _: next(free))
    monkeypatch.setattr(graph_memory, "reserved_bytes", lambda _: next(own))
    memory = graph_memory.GraphMemory(1 << 30, torch.device("cpu"))
    with memory.measured():
        pass
    assert memory.used == (30 << 20) + graph_memory.DRIVER and not memory.is_full


def test_a_rank_without_memory_for_a_step_ends_all() -> None:
    """Its peers have begun the step, and wait for its values: leaving out a graph would not help them."""
    with (
        pytest.raises(graph_memory.StepMemoryError, match="rank 1 has no memory"),
        graph_memory.together(Mesh(rank=1, world=2)),
    ):
        raise NO_MEMORY
    with pytest.raises(torch.OutOfMemoryError), graph_memory.together(ALONE):
        raise NO_MEMORY


@pytest.mark.parametrize("bound", [None, 250, 0.03], ids=["default", "bytes", "fraction"])
def test_memory_of_graphs_is_bounded(
    bound: int | float | None,
    make: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each capture takes as much memory as it has sequences, times 10: the third goes over 5 % of 1,000 bytes."""
    llm = make(LLAMA, decode_graphs=True, graph_memory=bound, max_seqs=8)
    runner = llm.engine.runner
    assert isinstance(runner, Runner) and runner.decode is not None
    taken = chain.from_iterable((1000 - a, 1000 - b) for a, b in pairwise((0, 10, 30, 70, 150, 310)))
    cuda = FakeCuda(monkeypatch, {}, taken)
    runner.decode._stream = cuda  # type: ignore[assignment]
    for seqs in (1, 2, 4, 8):
        runner.decode.graph(seqs, 1)
    rows = {row["seqs"]: row for row in llm.explain_graphs()}
    kept = {None: [1, 2], 250: [1, 2, 4, 8], 0.03: [1, 2]}[bound]
    assert [seqs for seqs, row in rows.items() if row["captured"]] == kept
    assert sum(row["bytes"] for row in rows.values()) == llm.engine.status().graph_bytes == 10 * sum(kept)
    assert f"decode graphs: {10 * sum(kept)} bytes" in llm.engine.dump()
    said = [record.getMessage() for record in caplog.records if "graph_memory allows" in record.getMessage()]
    assert len(said) == (len(kept) < 4)
    if said:
        assert rows[4]["reason"] == rows[8]["reason"] == "the memory that graph_memory allows is used up"
        contexts = "512, 4096"
        assert (
            f"1 (contexts up to {contexts[5:]}), 2 (contexts up to {contexts[5:]}), 4, 8 requests" in said[0]
        )
        assert cuda.captured == [1, 2, 4] and cuda.emptied == 1


def test_another_failure_of_a_capture_is_an_error(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(LLAMA, decode_graphs=True)
    assert llm.engine.runner.decode is not None
    cuda = FakeCuda(monkeypatch, {1: [RuntimeError("operation not permitted when stream is capturing")]})
    llm.engine.runner.decode._stream = cuda  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="could not be captured, though .*: operation not permitted"):
        llm.generate([1, 2, 3], PARAMS[0])


def test_a_step_whose_kernels_have_run_is_captured_at_once(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of its kind runs before, and those that call a kernel that has not run; nobody runs on a stream of its own otherwise."""
    llm = make(LLAMA, decode_graphs=True, max_seqs=8)
    runner = llm.engine.runner
    assert isinstance(runner, Runner) and runner.decode is not None
    cuda, graphs = FakeCuda(monkeypatch, {}), runner.decode
    graphs._stream = cuda  # type: ignore[assignment]
    monkeypatch.setattr(
        BoundPlan, "_code", lambda plan, index, *_: (index,)
    )  # each bucket has a kernel of its own
    for plan in llm.model.plans.bound.values():  # other engines of this process may have run it
        plan._ran.clear()
        plan.adopt(SimpleNamespace(entries=[plan.entry(2), plan.entry(4)]))  # type: ignore[arg-type]
    for seqs, context, ran in ((4, 1, [4]), (4, 4000, [4]), (2, 1, [4, 2]), (2, 4000, [4, 2])):
        assert graphs.graph(seqs, context).captured and cuda.ran == ran
    assert graphs.graph(4, 1, per_seq=2).captured and cuda.ran == [4, 2, 4]
    assert cuda.captured == [4, 4, 2, 2, 4]
    monkeypatch.setattr(llm.model.plans, "mesh", Mesh(rank=0, world=2))
    graphs.graphs.clear()
    assert graphs.graph(4, 1).captured and cuda.ran == [4, 2, 4, 4], "the other rank may have to run it"


@pytest.mark.parametrize("left", [1, 2])
def test_a_step_that_cannot_be_captured_at_once_runs_before(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A driver may refuse to load code during a capture. What fails after a run as well is an error."""
    llm = make(LLAMA, decode_graphs=True)
    assert isinstance(llm.engine.runner, Runner) and llm.engine.runner.decode is not None
    graphs, errors = llm.engine.runner.decode, dict[int, list[Exception]]()
    cuda = FakeCuda(monkeypatch, errors)
    graphs._stream = cuda  # type: ignore[assignment]
    graphs.graph(4, 1)
    errors[4] = [RuntimeError("operation not permitted when stream is capturing")] * left
    with nullcontext() if left == 1 else pytest.raises(RuntimeError, match="could not be captured"):
        assert graphs.graph(4, 4000).captured
    assert cuda.ran == [4, 4]


@pytest.mark.parametrize("memory", [-1, 0.0, 1.5, True, "5%"])
def test_a_wrong_bound_of_graph_memory_is_refused(memory: Any) -> None:
    with pytest.raises(UsageError, match="graph_memory must be bytes"):
        EngineConfig(graph_memory=memory)


def test_workspaces_are_shared_but_for_zeros() -> None:
    workspaces = Workspaces(torch.device("cpu"))
    assert workspaces.take("a", Workspace(0)) is None
    small = workspaces.take("a", Workspace(100))
    assert small is workspaces.take("b", Workspace(64))
    zeros = workspaces.take("a", Workspace(64, zeroed=True))
    assert zeros is not small and not zeros.any()
    zeros[:8] = 7  # memory that a kernel keeps for itself is not given to another one
    other = workspaces.take("b", Workspace(64, zeroed=True))
    assert other is not zeros and not other.any()
    assert workspaces.take("a", Workspace(64, zeroed=True)) is zeros
    large = workspaces.take("b", Workspace(101))
    assert large.numel() == 101 and large is workspaces.take("a", Workspace(100))
    assert len(workspaces.held()) == 3
