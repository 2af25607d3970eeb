"""gpt-oss over two KV groups: the ids are those of one group, half of a long context's blocks are given back, and none is read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.runtime import engine_loading
from gristmill.runtime.engine import Engine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.kv_cache.size import cache_blocks
from gristmill.runtime.llm import LLM
from gristmill.runtime.models.llama import Llama
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import SchedulerConfig
from tests.runtime.late_runner import LateRunner
from tests.runtime.poison import poison
from tests.runtime.test_models import build

WINDOW = 16
PARAMS = [SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)] * 5
BASE = [(7 * i * i + 3) % 300 for i in range(150)]
PROMPTS = [BASE[:50], BASE[:50] + [5, 6, 7], BASE[:33] + [9], BASE[100:103], BASE[:120]]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_cache": False, "block_size": 5},
    "chunks": {"max_chunk": 7, "block_size": 4},
    "preemption": {"num_blocks": 62, "block_size": 4, "max_seqs": 4, "max_batch_tokens": 16},
    "decode graphs": {"decode_graphs": True, "block_size": 4},
    "prompt graphs": {"prompt_graphs": 64, "max_chunk": 9, "block_size": 4},
    "drafts in graphs": {"speculate": "ngram:3", "block_size": 4, "decode_graphs": True},
    "drafts": {"speculate": "ngram:3", "block_size": 4},
    "asynchronous": {"async_steps": True, "block_size": 4, "max_chunk": 9},
    "asynchronous graphs": {"async_steps": True, "block_size": 4, "decode_graphs": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt-oss")
    kinds = ["sliding_attention", "full_attention"] * 2
    build("gpt-oss", path, num_hidden_layers=4, layer_types=kinds, sliding_window=WINDOW)
    return path


@pytest.fixture(scope="module")
def one_group(make: Callable[..., LLM], folder: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Llama, "kv_groups", ())
        llm = make(folder, num_blocks=256, decode_graphs=False)
    assert llm.engine.runner.cache.windows == (0,)
    return ids(llm)


def ids(llm: LLM) -> list[list[int]]:
    return [list(done.token_ids) for done in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", OPTIONS)
def test_ids_are_those_of_one_group(
    name: str,
    make: Callable[..., LLM],
    folder: Path,
    one_group: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name.startswith("asynchronous"):
        monkeypatch.setattr(engine_loading, "Runner", LateRunner)
    llm = make(folder, **OPTIONS[name])
    assert llm.engine.scheduler.config.windows == llm.engine.runner.cache.windows == (0, WINDOW)
    if not name.startswith("asynchronous") and name != "drafts in graphs":  # whose padding reads free blocks
        poison(llm)
    released: list[int] = []
    release_behind = llm.engine.scheduler._release_behind

    def counted(request: Any, computed: int) -> None:
        before = llm.engine.scheduler.pool.num_available
        release_behind(request, computed)
        released.append(llm.engine.scheduler.pool.num_available - before)

    llm.engine.scheduler._release_behind = counted  # type: ignore[method-assign]
    assert ids(llm) == one_group
    assert sum(released) > 10
    if name != "no prefix cache":
        assert ids(llm) == one_group, "prefixes of the first run"
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.num_referenced == 0
    cache = llm.engine.runner.cache
    assert not cache.storage[:, :, cache.num_blocks].any(), "the null block was written"


def test_tables_of_another_group_show(
    make: Callable[..., LLM], folder: Path, one_group: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedCache, "batches", lambda self, batch: [batch] * len(self.layers))
    assert ids(make(folder, block_size=4, decode_graphs=False)) != one_group


@pytest.mark.parametrize("decode_graphs", [False, True])
def test_a_window_that_is_too_small_shows(
    decode_graphs: bool,
    make: Callable[..., LLM],
    folder: Path,
    one_group: list[list[int]],
) -> None:
    """Planted fault: blocks are given back one block too early."""
    llm = make(folder, block_size=4, decode_graphs=decode_graphs)
    release_behind = llm.engine.scheduler._release_behind
    llm.engine.scheduler._release_behind = lambda r, n: release_behind(r, n + 5)  # type: ignore[method-assign]
    poison(llm)
    assert ids(llm) != one_group


def test_graph_inputs_hide_what_was_given_back(make: Callable[..., LLM], folder: Path) -> None:
    llm = make(folder, block_size=4, decode_graphs=True)
    ids(llm)
    decode = llm.engine.runner.decode
    assert decode is not None
    full, windowed = decode.state.table[:, 0]
    null, rows = llm.engine.runner.cache.num_blocks, (len(PROMPTS[0]) + 29) // 4
    first = (len(PROMPTS[0]) + 28 - WINDOW + 1) // 4
    assert null not in full[:rows] and set(windowed[:first]) == {null} and null not in windowed[first:rows]


def test_half_of_a_long_context_is_given_back(make: Callable[..., LLM], folder: Path) -> None:
    """The bytes of the cache that a request of 240 tokens holds, beside those of one group."""
    llm = make(folder, block_size=4)
    engine = llm.engine
    engine.add_request("r", (BASE * 2)[:220], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    held = []
    while engine.has_unfinished():
        engine.step()
        held.append(engine.scheduler.pool.num_referenced)
    assert held[-2] == 60 + WINDOW // 4 + 1 - (held[-2] == 64)
    cache = engine.runner.cache
    block = cache.storage[:, :, 0].nbytes
    single = PagedCache(llm.config, 8, 4, torch.float32, torch.device("cpu"))
    assert 2 * block == single.storage[:, :, 0].nbytes
    assert held[-2] * block < 0.55 * 60 * single.storage[:, :, 0].nbytes


def test_the_same_memory_holds_twice_the_blocks(make: Callable[..., LLM], folder: Path) -> None:
    model = make(folder).model
    for memory in (10**6, 10**7):
        alone = cache_blocks(model, 16, memory, 8, 256)
        assert cache_blocks(model, 16, memory, 8, 256, groups=model.kv_groups) // 2 == alone


def test_cached_tokens_once_per_request(make: Callable[..., LLM], folder: Path) -> None:
    engine = make(folder, block_size=4).engine
    found = []
    for name in "ab":
        engine.add_request(name, BASE[:81], PARAMS[0])
        request = engine.scheduler.requests[name]
        while engine.has_unfinished():
            engine.step()
        found.append((request.cached_tokens, request.output_ids))
    assert found[0] == (0, found[1][1]) and found[1][0] == 80


def test_a_scheduler_without_the_groups_of_the_cache_is_refused(
    make: Callable[..., LLM], folder: Path
) -> None:
    runner = make(folder).engine.runner
    assert isinstance(runner, Runner)
    with pytest.raises(UsageError, match=r"groups with the windows \(0, 16\), the scheduler \(0,\)"):
        Engine.from_parts(runner, SchedulerConfig(num_blocks=256, max_seqs=8))
    Engine.from_parts(runner, SchedulerConfig(num_blocks=256, max_seqs=8, windows=runner.cache.windows))
