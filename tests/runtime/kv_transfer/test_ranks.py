"""KV transfer of a model over ranks: a record has the parts of all ranks; a rank that dies ends requests, and the next ones load again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.runtime.errors import RankError
from gristmill.runtime.kv_transfer.transfer import NO_MEMORY
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.kv_transfer.test_transfer import PARAMS, PROMPTS, WHOLE, again, ids, status
from tests.runtime.oracle import DEEPSEEK, LLAMA


@pytest.fixture
def expected(shared: Callable[..., LLM]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in shared(LLAMA).generate(PROMPTS, PARAMS)]


@pytest.fixture
def llm(make: Callable[..., LLM], tmp_path: Path) -> Iterator[LLM]:
    """Returns a model on two ranks, and afterwards looks for files that are left."""
    before = set(Path("/dev/shm").iterdir())
    store = f"file:{tmp_path},save_after=1"
    made = make(LLAMA, tensor_parallel=2, rank_timeout=60, async_steps=True, kv_transfer=store)
    yield made
    made.close()
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "gristmill-kv" in path.name]


@pytest.mark.slow
def test_blocks_of_two_ranks(
    llm: LLM,
    expected: list[tuple[int, ...]],
    make: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ids(llm) == expected and again(llm) == expected
    assert status(llm).loaded_tokens == WHOLE and not status(llm).failures

    def fails(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails)
        assert again(llm) == expected
    assert status(llm).failures == {NO_MEMORY: 3}
    alone = make(LLAMA, kv_transfer=f"file:{tmp_path}")
    assert ids(alone) == expected and status(alone).loaded_tokens == 0, "with one rank it is another cache"


@pytest.mark.slow
def test_ranks_that_die_are_started_again_and_load(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner) and ids(llm) == expected
    llm.engine.reset_prefix_cache()
    stream = llm.stream([PROMPTS[0]], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    os.kill(runner._processes[1].process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 died"):
        list(stream)
    assert not llm.engine.has_unfinished() and not llm.engine._active
    loaded = status(llm).loaded_tokens
    assert ids(llm) == expected, "blocks are loaded into empty caches"
    assert status(llm).loaded_tokens == loaded + WHOLE

    llm.engine.reset_prefix_cache()
    os.kill(runner._processes[0].process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 died"):  # while blocks are loaded, or in the step
        llm.generate(PROMPTS, PARAMS)
    assert again(llm) == expected
    llm.engine.scheduler.check()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spread"), [(LLAMA, False), (DEEPSEEK, False), (DEEPSEEK, True)])
def test_preemptions_and_spread_contexts(name: str, spread: bool, make: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [[(token + i) % 300 for token in oracle.window(0)[:20]] for i in range(4)]
    expected = [done.token_ids for done in make(name).generate(prompts, params)]
    blocks = 8 if spread else 13
    limits = {"num_blocks": blocks, "max_seqs": 4, "max_batch_tokens": 32, "rank_timeout": 60}
    llm = make(
        name, tensor_parallel=2, context_parallel=spread, kv_transfer="host:1GiB,save_after=1", **limits
    )
    try:
        for _ in range(3):
            llm.engine.reset_prefix_cache()
            assert [done.token_ids for done in llm.generate(prompts, params)] == expected
            llm.engine.scheduler.check()
            assert llm.engine.flush_kv_transfer(60)
        assert status(llm).loaded_tokens
    finally:
        llm.close()
