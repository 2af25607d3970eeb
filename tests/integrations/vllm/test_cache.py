"""The worker's cache: groups of layers with windows, its size after a step of the largest size, and sleep."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

import gristmill
from gristmill.integrations.vllm import Worker
from gristmill.integrations.vllm.cache import BlockTables, activation_bytes, cache_bytes
from gristmill.runtime.kv_cache.groups import KVGroup
from gristmill.runtime.models.llama import Llama
from tests.integrations.vllm.conftest import MODELS
from tests.integrations.vllm.test_requests import SHAPE, config_of
from tests.integrations.vllm.test_worker import GREEDY, Host, generated, own, prompts, texts
from tests.runtime.test_models import build


def test_blocks_of_groups_are_one_list_with_full_attention_first() -> None:
    full, window = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=32)
    tables = BlockTables(config_of((window, [3, 1]), (full, [2, 0])))
    assert tables.groups == (KVGroup((0, 2)), KVGroup((1, 3), 32))
    assert tables.interleaved(([0, 7, 8], [4, 5, 6])) == [4, 0, 5, 7, 6, 8]
    # Without vLLM's hybrid cache manager one group keeps all tokens, whatever window its spec names.
    kept = BlockTables(config_of((FullAttentionSpec(**SHAPE, sliding_window=32), [0, 1])))
    assert kept.groups == () and kept.interleaved(([4, 5],)) == [4, 5]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss with windows of 32 tokens in every second of four layers."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    kinds = ["sliding_attention", "full_attention"] * 2
    build("gpt-oss", folder, num_hidden_layers=4, layer_types=kinds, sliding_window=32)
    return folder


def test_windows_have_groups_of_their_own(
    host: Host, windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [[(7 * i * i + 3 * j) % 300 for i in range(n)] for j, n in enumerate((150, 60, 33, 90))]
    wish = gristmill.SamplingParams(max_tokens=24, ignore_eos=True)
    runtime = gristmill.LLM(windowed, dtype="float32", block_size=16, num_blocks=256, warm="off")
    expected = [list(done.token_ids) for done in runtime.generate(ids, wish)]
    options: dict[str, Any] = {
        "max_model_len": 192,
        "block_size": 16,
        "max_num_batched_tokens": 64,
        "skip_tokenizer_init": True,
    }
    params = GREEDY.clone()
    params.detokenize = False

    llm = host(windowed, **options)
    worker = worker_of(llm)
    assert worker.runner.cache.windows == (0, 32)
    for _ in range(2):  # the second time with hits in the prefix cache
        assert generated(llm.generate(prompts(ids), params)) == expected
    # Planted: both groups have the blocks of one. Their layers share memory.
    fault = BlockTables.interleaved
    monkeypatch.setattr(BlockTables, "interleaved", lambda self, ids: fault(self, ids[:1] * 2))
    llm.reset_prefix_cache()
    assert generated(llm.generate(prompts(ids), params)) != expected


def worker_of(llm: Any) -> Worker:
    worker: Worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker


def test_sleep_gives_the_memory_back(host: Host) -> None:
    llm, ids = host("docs-llama"), texts(3)
    worker, expected = worker_of(llm), own("docs-llama", ids)
    for level in (1, 2):
        llm.sleep(level)
        assert worker.runner is not None and worker.runner.cache.nbytes == 0
        assert (worker.residency is not None) and ("weights" in worker.residency.absent) == (level == 2)
        llm.wake_up(["weights"] if level == 2 else None)
        if level == 2:
            llm.collective_rpc("gristmill_update_weights", args=(str(MODELS / "docs-llama"),))
            llm.wake_up(["kv_cache"])
        assert generated(llm.generate(prompts(ids), GREEDY)) == expected


def test_a_step_of_a_sleeping_worker_says_what_to_do(host: Host) -> None:
    llm = host("docs-llama")
    worker = worker_of(llm)
    worker.sleep(1)
    ended = SchedulerOutput.make_empty()
    ended.finished_req_ids = {"a"}
    output = worker.execute_model(ended)
    assert output is not None and output.req_ids == []
    with pytest.raises(gristmill.UsageError, match="call wake_up"):
        llm.generate(prompts(texts(1)), GREEDY)
    with pytest.raises(gristmill.UsageError, match="does not release kv_cache alone"):
        worker.discard(("kv_cache",))


def limits(tokens: int, seqs: int, given: int | None = None, drafts: int = 0) -> Any:
    """A VllmConfig as far as it is read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=seqs),
        model_config=SimpleNamespace(max_model_len=512),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=given, gpu_memory_utilization=0.9),
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return gristmill.LLM(MODELS / "docs-llama", dtype="float32", num_blocks=4, warm="off").engine.runner.model


def test_the_cache_leaves_room_for_the_largest_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_bytes(model, limits(256, 16, given=12345)) == 12345
    activation_bytes(model, limits(256, 16))  # kernels are loaded
    gc.collect()  # what other tests have left must not be given back meanwhile
    small = activation_bytes(model, limits(256, 16))
    assert 0 <= small < 100 << 20
    assert activation_bytes(model, limits(256, 16, drafts=3)) < 200 << 20
    forward: Callable[..., Any] = Llama.forward

    def planted(self: Any, *args: Any) -> Any:
        torch.ones(50 << 20).sum()  # 200 MiB that a step needs while it runs
        return forward(self, *args)

    monkeypatch.setattr(Llama, "forward", planted)
    assert 180 << 20 < activation_bytes(model, limits(256, 16)) - small < 260 << 20


def test_nothing_left_is_said(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.integrations.vllm import cache

    monkeypatch.setattr(cache, "_memory", lambda device: (50, 1000))
    with pytest.raises(gristmill.UsageError, match="50 of 1000 bytes are free, a step needs"):
        cache_bytes(model, limits(64, 4))
