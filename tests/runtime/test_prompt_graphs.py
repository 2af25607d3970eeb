"""Steps with prompts in pieces between attention calls give the same ids as without, whatever the batch does. Capture itself: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.autotune import bound
from gristmill.runtime import graph_memory
from gristmill.runtime.batch import Batch
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel.mesh import Mesh
from gristmill.runtime.prompt_graphs import LARGEST, PromptGraphs, most_tokens, sizes
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA

PARAMS = [
    SamplingParams(max_tokens=6),
    SamplingParams(max_tokens=4, temperature=0.8, seed=3),
    SamplingParams(max_tokens=7, prompt_logprobs=1, repetition_penalty=1.2),
]


def prompts() -> list[list[int]]:
    """Prompts with a common prefix, so that the prefix cache serves some of them."""
    start = oracle.eval_tokens()[:40]
    return [start + oracle.eval_tokens()[n : n + 7 * i] for i, n in enumerate((100, 200, 300, 400))]


def params() -> list[SamplingParams]:
    return [PARAMS[i % 3] for i in range(4)]


def prompts_of(llm: LLM) -> PromptGraphs:
    runner = llm.engine.runner
    assert isinstance(runner, Runner) and runner.prompts is not None
    return runner.prompts


def test_sizes_bound_the_padding() -> None:
    assert sizes(0) == [] and sizes(7) == [7] and sizes(16) == [16] and sizes(40) == [16, 32, 40]
    found = sizes(LARGEST)
    assert found[-1] == LARGEST and len(found) < 60
    assert all(b - a <= max(16, a // (4 if a < 512 else 8)) for a, b in pairwise(found))


def test_the_largest_step_is_bounded_by_its_arithmetic(shared: Callable[..., LLM]) -> None:
    """Kernels of a small model take less time than its launches, whatever the step."""
    assert most_tokens(shared(LLAMA).config) == LARGEST


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 14, "max_seqs": 3}, {"max_chunk": 8, "decode_graphs": True}],
    ids=["plain", "preemption", "chunks"],
)
def test_same_ids(make_plain: Callable[..., LLM], options: dict[str, Any]) -> None:
    through = make_plain(LLAMA, prompt_graphs=48, **options)
    assert through.generate(prompts(), params()) == make_plain(LLAMA, **options).generate(prompts(), params())
    rows = [row for row in through.explain_graphs() if "in pieces" in row["reason"]]
    assert sum(row["steps"] for row in rows) >= 4 and {row["captured"] for row in rows} == {False}


def test_after_sleep_and_for_no_other_attention(make_plain: Callable[..., LLM]) -> None:
    through = make_plain(LLAMA, prompt_graphs=64)
    expected = through.generate(prompts(), params())
    through.engine.sleep()
    assert through.engine.runner.prompts is None  # type: ignore[union-attr]
    through.engine.wake_up()
    assert through.generate(prompts(), params()) == expected and prompts_of(through).graphs
    assert make_plain(DEEPSEEK, prompt_graphs=64).engine.runner.prompts is None  # type: ignore[union-attr]
    for wrong in (-1, True, 2.5):
        with pytest.raises(UsageError, match="prompt_graphs must be an integer"):
            make_plain(LLAMA, prompt_graphs=wrong)


def test_padding_that_writes_shows(make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: padding writes where the first token does."""
    write = PromptGraphs._write

    def careless(self: PromptGraphs, batch: Batch, size: int) -> None:
        write(self, batch, size)
        self._inputs[2:, len(batch.tokens) : size] = self._inputs[2:, :1]

    expected = make_plain(LLAMA).generate(prompts(), params())
    monkeypatch.setattr(PromptGraphs, "_write", careless)
    assert make_plain(LLAMA, prompt_graphs=256).generate(prompts(), params()) != expected


class FakeGraph(TorchDispatchMode):
    """A captured piece on a CPU: the operations of torch that ran, which a replay runs again into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self, pool: int, **options: Any) -> None:
        cuda = torch.cuda.current_stream()
        cuda.begin(pool)  # type: ignore[attr-defined]
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        torch.cuda.current_stream().end()  # type: ignore[attr-defined]

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        self.operations.append((function, arguments, named or {}, result))
        return result

    def replay(self) -> None:
        """Run the operations; a result that is new memory goes to that of the capture."""
        for function, arguments, named, result in self.operations:
            again = function(*arguments, **named)
            for to, value in zip(_tensors(result), _tensors(again), strict=True):
                if to.data_ptr() != value.data_ptr():
                    to.copy_(value)


def _tensors(values: Any) -> list[Tensor]:
    return [
        value
        for value in (values if isinstance(values, list | tuple) else [values])
        if isinstance(value, Tensor)
    ]


class FakeCuda:
    """Streams and captures on a CPU. `error` is raised at the end of a capture while there are any `errors` left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: int = 0) -> None:
        self.errors, self.pools, self.capturing = errors, set[int](), False
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: len(self.pools))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(bound, "_capturing", lambda: self.capturing)

    def wait_stream(self, other: Any) -> None: ...

    def begin(self, pool: int) -> None:
        self.pools.add(pool)
        self.capturing = True

    def end(self) -> None:
        self.capturing = False
        if self.errors:
            self.errors -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize(
    ("errors", "bound"), [(0, None), (1, None), (0, 4)], ids=["all", "no memory", "bounded"]
)
def test_pieces_are_replayed_around_attention(
    make_plain: Callable[..., LLM],
    make_strict: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    errors: int,
    bound: int | None,
) -> None:
    """What a replay computes follows from its inputs alone; a step without memory for its capture, or over the bound, runs kernel by kernel."""
    expected = make_plain(LLAMA).generate(prompts(), params())
    through = make_strict(LLAMA, "torch", prompt_graphs=96, graph_memory=bound)
    cuda, free = FakeCuda(monkeypatch, errors), count(0, -4)  # each capture takes 4 bytes
    monkeypatch.setattr(graph_memory, "free_bytes", lambda _: next(free))
    monkeypatch.setattr(graph_memory, "total_bytes", lambda _: 10_000)
    graphs = prompts_of(through)
    graphs._stream = cuda  # type: ignore[assignment]
    ran: list[int] = []
    forward = graphs.model.forward
    graphs.model.forward = lambda *a: (ran.append(1), forward(*a))[1]  # type: ignore[method-assign]
    for _ in range(2):
        assert [r.token_ids for r in through.generate(prompts(), params())] == [r.token_ids for r in expected]
    layers = through.config.num_layers
    captured = [graph for graph in graphs.graphs.values() if not graph.reason]
    assert captured and all(len(g.pieces) == layers + 1 and len(g.calls) == layers for g in captured)
    assert sum(graph.steps for graph in captured) > (0 if errors or bound else len(ran) / 4)
    assert sum(graph.nbytes for graph in captured) == through.engine.status().graph_bytes == 4 * len(captured)
    failed = [graph for graph in graphs.graphs.values() if graph.reason]
    assert bool(failed) == bool(errors or bound) and all(not g.pieces and not g.calls for g in failed)
    assert (len(captured), caplog.text.count("graph_memory allows")) == (1, 1) or not bound
    assert ("no memory to capture steps" in caplog.text) == bool(errors)


@pytest.mark.parametrize("fault", ["", "a kernel has not run", "a failed capture", "ranks", "memory"])
def test_a_step_whose_kernels_have_run_is_captured_at_once(
    make_strict: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """After the first one; one that fails is run, and captured whole."""
    llm = make_strict(LLAMA, "torch", prompt_graphs=64)
    cuda, graphs = FakeCuda(monkeypatch), prompts_of(llm)
    graphs._stream = cuda  # type: ignore[assignment]
    monkeypatch.setattr(graph_memory, "free_bytes", lambda _: 0)
    ran: list[int] = []
    forward = graphs.model.forward

    def run(batch: Batch, cache: Any) -> Tensor:
        ran.append(len(batch.tokens) if not cuda.capturing else -len(batch.tokens))
        hidden = forward(batch, cache)
        if fault == "a failed capture" and ran == [64, -64, -48]:
            raise RuntimeError("operation not permitted when stream is capturing")
        return hidden

    graphs.model.forward = run  # type: ignore[method-assign]
    sizes = {"a kernel has not run": (64, 32), "": (64, 60)}.get(fault, (64, 48))
    for size in sizes:
        if fault == "ranks":
            monkeypatch.setattr(graphs.model.plans, "mesh", Mesh(rank=0, world=2))
        if fault == "memory" and size == 48:
            graphs._memory.clear()
        graphs.graphs[size] = made = graphs._make(size)
        assert not made.reason and len(made.pieces) == llm.config.num_layers + 1 == len(made.calls) + 1
    first, second = sizes
    tried = fault in ("a kernel has not run", "a failed capture", "memory")
    assert ran == [first, -first, *[-second] * tried, *[second] * (fault != ""), -second]


def test_warm_up_runs_every_size(make_plain: Callable[..., LLM]) -> None:
    """The largest first, and no size that no step can have; a request then needs no other."""
    through = make_plain(LLAMA, prompt_graphs=96, max_batch_tokens=70, max_seqs=4)
    through.engine.warm_up()
    assert [*prompts_of(through).graphs] == [80, 64, 48, 32, 16]
    through.generate(prompts(), PARAMS[0])
    assert len(prompts_of(through).graphs) == 5
