"""A rehearsal runs one layer of each kind: which those are, what it calls, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gristmill.runtime.layer_kinds import repeated_layers
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.runtime.models.llama import Decoder
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from tests.runtime.oracle import DEEPSEEK, LLAMA
from tests.runtime.test_models import build

LIMITS = {"num_blocks": 40, "max_batch_tokens": 90, "max_seqs": 6, "max_model_len": 600}
ROW = SamplingRow(SamplingParams(temperature=1.0), 0, 0)


def runner_of(llm: LLM) -> Runner:
    runner = llm.engine.runner
    assert isinstance(runner, Runner)
    return runner


def step(runner: Runner, tokens: int = 5) -> Callable[[], object]:
    """A prompt of so many tokens."""
    groups = len(runner.cache.windows)
    entry = ScheduledRequest("a", 0, tokens, True, [0] * tokens, [0] * groups, [], 0)
    return lambda: runner.run([entry], [ROW])


def windowed(make: Callable[..., LLM], folder: Path, **options: Any) -> LLM:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
    build("gpt-oss", folder, num_hidden_layers=5, layer_types=kinds, sliding_window=16)
    return make(folder, warm="off", **options)


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK, "windows"])
def test_layers_of_a_kind_call_the_same_kernels(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """DeepSeek's first layer has no experts; layers with a window are not those without. What is left calls all that the model does."""
    llm = windowed(make, tmp_path) if name == "windows" else make(name, warm="off")
    runner = runner_of(llm)
    repeated = repeated_layers(runner, step(runner))
    layers = llm.config.num_layers
    dense = layers - sum(map(llm.config.is_moe_layer, range(layers)))
    first = {LLAMA: {0}, DEEPSEEK: {0, dense}, "windows": {0, 1}}[name]
    assert repeated == frozenset(range(layers)) - first and runner.left_out == frozenset()
    calls = []
    for left_out in (frozenset(), repeated):
        runner.left_out = left_out
        with runner.model.plans.recorded() as found:
            step(runner)()
        calls.append([*found])
    assert calls[0] == calls[1] and len(calls[0]) > 5


def test_what_layers_call_tells_them_apart(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: their calls are not looked at, and those of experts are missed."""
    recorded = Plans.recorded

    @contextmanager
    def blind(plans: Plans) -> Iterator[dict[object, None]]:
        with recorded(plans):
            yield {}

    runner = runner_of(make(DEEPSEEK, warm="off"))
    right = repeated_layers(runner, step(runner))
    monkeypatch.setattr(Plans, "recorded", blind)
    assert repeated_layers(runner, step(runner)) > right


def test_rehearsals_run_one_layer_of_each_kind(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards all layers run: the ids are those without a warm-up."""
    ran: list[frozenset[int]] = []
    forward = Decoder.forward

    def counted(model: Decoder, batch: Any, *rest: Any) -> Any:
        ran.append(batch.left_out)
        return forward(model, batch, *rest)

    cold, llm = (
        windowed(make, tmp_path / str(i), decode_graphs=True, prompt_graphs=32, **LIMITS) for i in range(2)
    )
    monkeypatch.setattr(Decoder, "forward", counted)
    report = llm.engine.warm_up()
    assert report.ran and frozenset({2, 3, 4}) in ran
    assert ran.index(frozenset({2, 3, 4})) < len(ran) - 1 - ran[::-1].index(frozenset({2, 3, 4}))
    captured = ran[len(ran) - ran[::-1].index(frozenset({2, 3, 4})) :]
    assert captured and not any(captured), "graphs have all layers"
    ran.clear()
    prompts = [[7, 8, 9] * 9, [5, 6]]
    answers = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    assert ran and not any(ran)
    assert answers == cold.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))


def test_a_rehearsal_that_fails_leaves_no_layer_out(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        assert runner.left_out
        raise OSError("gone")

    llm = make(LLAMA, warm="off", **LIMITS)
    runner = runner_of(llm)
    monkeypatch.setattr("gristmill.autotune.bound.BoundPlan._load", fail)
    with pytest.raises(OSError, match="gone"):
        llm.engine.warm_up()
    assert runner.left_out == frozenset()
