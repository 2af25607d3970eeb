"""An engine over a cache that its embedder allocated: the ids of an engine with a cache of its own, in a host's layout, NaN at first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gristmill
from gristmill.runtime import ExternalCache, Runner, SchedulerConfig, load_model
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.kv_cache.size import make_cache
from gristmill.runtime.models import Model

MODELS = Path(__file__).parents[2] / "examples" / "models"
BLOCKS, SIZE = 24, 16
PROMPTS = [list(range(100, 140)), [7], list(range(100, 133))]
PARAMS = gristmill.SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["docs-llama", "docs-deepseek", "fp8_token_head"])
def model(request: pytest.FixtureRequest) -> Model:
    kv = request.param if request.param.startswith("fp8") else "auto"
    name = "docs-llama" if kv != "auto" else request.param
    return load_model(MODELS / name, "float32", None, "cpu", None, SIZE, kv)


def in_a_hosts_layout(model: Model) -> list[tuple[Tensor, ...]]:
    """K and V of a head side by side, heads before tokens; two blocks more than the engine gets, around its own."""
    layers = []
    for layer in make_cache(model, BLOCKS, SIZE).layers:
        if len(layer) == 1:
            memory = torch.full((BLOCKS + 2, 2, SIZE, layer[0].shape[-1]), torch.nan)
            layers.append((memory[1:-1, 1],))
            continue
        heads, width = layer[0].shape[2:]
        memory = (
            torch.full((BLOCKS + 2, heads, SIZE, 2 * width), torch.nan).to(layer[0].dtype).transpose(1, 2)
        )
        scales = [torch.full((BLOCKS, SIZE, heads), torch.nan) for _ in layer[2:]]
        layers.append((memory[1:-1, ..., :width], memory[1:-1, ..., width:], *scales))
    return layers


def answers(engine: gristmill.Engine) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, PARAMS)
    ids: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            ids.setdefault(output.id, []).extend(output.new_ids)
    return [ids[str(index)] for index in range(len(PROMPTS))]


def engine_over(model: Model, cache: PagedCache) -> gristmill.Engine:
    config = SchedulerConfig(num_blocks=BLOCKS, block_size=SIZE, max_batch_tokens=32, max_seqs=4)  # chunks
    return gristmill.Engine.from_parts(Runner(model, cache), config)


def test_the_ids_are_those_of_a_cache_of_its_own(model: Model) -> None:
    expected = answers(engine_over(model, make_cache(model, BLOCKS, SIZE)))
    layers = in_a_hosts_layout(model)
    engine = engine_over(model, ExternalCache(model, layers))
    assert answers(engine) == expected
    written = sum(int(layer[0].float().isfinite().all(-1).sum()) for layer in layers)
    assert written > len(layers) * 60 and engine.status().cache_bytes > 0

    for layer in layers:  # the prefixes are in the caller's memory
        layer[0].fill_(0)
    assert answers(engine) != expected


def test_sleep_leaves_the_memory_to_the_caller(model: Model) -> None:
    layers = in_a_hosts_layout(model)
    engine = engine_over(model, ExternalCache(model, layers))
    expected = answers(engine)
    engine.sleep()
    assert engine.status().cache_bytes == 0
    for layer in layers:
        for tensor in layer:
            tensor.fill_(torch.nan)
    engine.wake_up()
    assert answers(engine) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers[:-1], "the model has 6 layers, the cache is given for 5"),
        (lambda layers: [(), *layers[1:]], "layer 0 of the cache has no tensors"),
        (lambda layers: [*layers[:5], layers[5][:1]], "layer 5 of the cache takes 2 tensors, got 1"),
        (
            lambda layers: [*layers[:5], (layers[5][0], layers[5][1][1:])],
            "tensor 1 of layer 5 of the cache must be [24, 16, 2, 64], got [23, 16, 2, 64]",
        ),
        (
            lambda layers: [*layers[:5], (layers[5][0], layers[5][1].half())],
            "tensor 1 of layer 5 of the cache must be torch.float32 on cpu, got torch.float16 on cpu",
        ),
        (
            lambda layers: [*layers[:5], (layers[5][0], layers[5][1].mT.contiguous().mT)],
            "tensor 1 of layer 5 of the cache must have a contiguous last dimension, got strides",
        ),
        (
            lambda layers: [*layers[:5], (layers[5][0], layers[4][1])],
            "tensor 1 of layer 5 of the cache begins where tensor 1 of layer 4 of the cache does",
        ),
    ],
)
def test_memory_that_does_not_fit_is_refused_by_name(change: Callable[[Any], Any], message: str) -> None:
    model = load_model(MODELS / "docs-llama", "float32", None, "cpu", None, SIZE, "auto")
    with pytest.raises(gristmill.UsageError, match=re.escape(message)):
        ExternalCache(model, change(in_a_hosts_layout(model)))
