"""Steps that a CPU records: a replay computes what the step would, from what its buffers hold now; what cannot be repeated is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill import ops
from gristmill.autotune.errors import UnpreparedError
from gristmill.kernel_registry.policy import Policy
from gristmill.kernels.call_list import CallList, UnrecordableError, is_recording
from gristmill.runtime.llm import LLM
from gristmill.runtime.recorded_step import RecordedStep, StepMemory
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.speculation.config import Speculation
from tests.runtime.family_cases import build
from tests.runtime.oracle import DEEPSEEK, LLAMA

SIZE = 512


class Norm:
    """y = norm(2x + a shifted x) over buffers, with what steps have: native calls, views, operations in place, with new results, and `out=`."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(3, SIZE), torch.empty(3, SIZE)
        self.weight = torch.randn(SIZE)
        self.where = torch.tensor([2, 0, 1])
        self.plan = ops.bind("rms_norm", f"n={SIZE},x=fp32", "cpu").prepare([1, 4])

    def __call__(self) -> None:
        twice = self.x.new_empty(self.x.shape)
        torch.add(self.x, self.x, out=twice)
        twice.view(-1)[:SIZE].add_(1.0)
        rows = (twice + self.x.roll(1, 1))[self.where]
        normed = torch.empty_like(rows)
        self.plan(rows, self.weight, 1e-5, normed)
        half = normed.new_zeros(normed.shape)
        half.copy_(normed * 0.5)
        self.plan(half, self.weight, 1e-5, self.y)

    def expected(self) -> Tensor:
        self()
        return self.y.clone()


def test_a_replay_reads_the_buffers() -> None:
    step, memory = Norm(), StepMemory()
    recorded = RecordedStep(step, memory)
    assert recorded.calls == 2 and recorded.operations > 5
    first = step.y.clone()
    assert torch.equal(first, step.expected())  # recording computes the step
    for seed in range(3):
        step.x.copy_(torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed)))
        step.where.copy_(step.where.roll(1))
        want = step.expected()
        step.y.fill_(float("nan"))
        memory.fill(255)  # NaN: nothing of an earlier run is read
        recorded.replay()
        assert torch.equal(step.y, want) and not torch.equal(step.y, first)


def test_a_lost_call_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the last native call is left out."""
    run = CallList.run
    monkeypatch.setattr(CallList, "run", lambda self, begin, end: run(self, begin, end - (end == len(self))))
    step, memory = Norm(), StepMemory()
    recorded = RecordedStep(step, memory)
    want = step.expected()
    step.y.fill_(float("nan"))
    memory.fill(255)
    recorded.replay()
    assert not torch.equal(step.y, want)


@pytest.mark.parametrize(
    "read", [lambda x: x[0, 0].item(), lambda x: torch.equal(x, x), lambda x: bool((x > 0).any())]
)
def test_values_on_the_host_are_refused(read: Callable[[Tensor], object]) -> None:
    x = torch.randn(2, 2)
    with pytest.raises(UnrecordableError, match="reads a value on the host"):
        RecordedStep(lambda: [read(x), None][1], StepMemory())
    assert not is_recording()


def test_a_kernel_that_is_not_selected_yet_or_in_python_is_refused() -> None:
    x, w, y = torch.randn(3, SIZE), torch.ones(SIZE), torch.empty(3, SIZE)
    plan = ops.bind("rms_norm", f"n={SIZE},x=fp32", "cpu", Policy(pins={"rms_norm": ("rms_norm_torch",)}))
    with pytest.raises(UnpreparedError, match="was not prepared for size 3"):
        RecordedStep(lambda: plan(x, w, 1e-5, y), StepMemory())
    plan.prepare([3])
    with pytest.raises(UnrecordableError, match="rms_norm_torch runs in Python"):
        RecordedStep(lambda: plan(x, w, 1e-5, y), StepMemory())
    plan(x, w, 1e-5, y)  # as ever


def test_memory_is_used_again_when_nothing_holds_it() -> None:
    memory = StepMemory()
    with torch.inference_mode():
        first = torch.empty(64)
        memory.move(first)
        kept, address = first.view(8, 8)[1:], first.data_ptr()
        del first
        second = torch.empty(64)
        memory.move(second)
        assert second.data_ptr() != address  # a view holds the first
        del kept
        third = torch.empty(40)
        memory.move(third)
        assert third.data_ptr() == address and third.shape == (40,)
        tiny = torch.empty(2)
        memory.move(tiny)  # not worth half of a large one
    assert memory.nbytes == 4 * (64 + 64 + 2)


def test_calls_of_other_threads_are_not_noted() -> None:
    step, calls = Norm(), CallList()
    with calls.recording():
        other = threading.Thread(target=step)
        other.start()
        other.join()
        assert len(calls) == 0 and is_recording()
        step()
    step()
    assert len(calls) == 2 and not is_recording()
    with pytest.raises(ValueError, match="recorded native call: an argument out of its range"):
        calls.run(0, 3)


PROMPTS = [[1, 5, 9], [2] * 40, [7, 3], [4, 4, 4, 1], [11]]
PARAMS = [
    SamplingParams(max_tokens=5 + 7 * i, temperature=0.9 * (i % 2), seed=i, ignore_eos=True) for i in range(5)
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (LLAMA, {}),
        (LLAMA, {"quant": "int4_g32", "dtype": "bf16"}),
        (LLAMA, {"kv_dtype": "fp8_e4m3"}),
        (LLAMA, {"quant": "int8_ch", "activations": "int8", "block_size": 5}),
        (DEEPSEEK, {"max_seqs": 3}),
    ],
    ids=str,
)
def test_the_default_of_a_cpu(make: Callable[..., LLM], name: str, options: dict[str, Any]) -> None:
    """Requests that come and go, each number of them a record of its own, give the ids that they give kernel by kernel."""
    recorded, plain = make(name, **options), make(name, decode_graphs=False, **options)
    for prompts, params in ((PROMPTS, PARAMS), (PROMPTS[::-1], PARAMS)):
        assert recorded.generate(prompts, params) == plain.generate(prompts, params)
    rows = [row for row in recorded.explain_graphs() if row["seqs"]]
    assert {row["seqs"] for row in rows if row["captured"]} == set(range(1, 1 + options.get("max_seqs", 5)))
    assert all(row["bytes"] > 0 for row in rows[:1]) and not plain.explain_graphs()


@pytest.mark.parametrize(
    "family", ["gemma-2", "gemma-3", "command-r", "olmo-3", "gemma-4-e2b", "gemma-4-31b"]
)
def test_families_with_norms_and_activations_of_their_own(
    make: Callable[..., LLM], family: str, tmp_path: Path
) -> None:
    """LayerNorm, gelu, norms after a block and with 1 + w: all of it is native calls, and torch's operations between them."""
    build(family, tmp_path)
    recorded, plain = make(tmp_path), make(tmp_path, decode_graphs=False)
    assert recorded.generate(PROMPTS, PARAMS) == plain.generate(PROMPTS, PARAMS)
    rows = [row for row in recorded.explain_graphs() if row["seqs"]]
    assert {row["seqs"] for row in rows if row["captured"]} == set(range(1, 6)), rows


def test_no_memory_is_no_record(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, graph_memory=1)
    assert llm.generate(PROMPTS, PARAMS) == make(LLAMA, decode_graphs=False).generate(PROMPTS, PARAMS)
    rows = llm.explain_graphs()
    assert not any(row["captured"] for row in rows)
    assert "graph_memory allows is used up" in str(rows)


def test_drafts_of_one_length_are_recorded(make: Callable[..., LLM]) -> None:
    """Sequences are not padded on a CPU: with different numbers of drafts they run kernel by kernel."""
    drafts = Speculation("ngram", 3, adaptive=False)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5, 6], [8, 1, 7]]  # the last one repeats itself
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm = make(LLAMA, speculate=drafts)
    assert llm.generate(prompts, params) == make(LLAMA, decode_graphs=False).generate(prompts, params)
    assert llm.generate(prompts[2:], params) == make(LLAMA, decode_graphs=False).generate(prompts[2:], params)
    rows = llm.explain_graphs()
    assert any(row["captured"] and row["tokens_per_seq"] > 1 for row in rows if row["seqs"])
