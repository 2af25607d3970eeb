"""Greedy answers equal transformers' ids for every batch, chunk size, block size and cache state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import kernel_sets, oracle
from tests.runtime.oracle import NAMES, Comparison, answer

FEW, MANY = 40, 64
"""Tokens per answer: past two boundaries of blocks, or past four, which the slow tests take."""


def compare(what: str, llm: LLM, name: str, prompts: list[list[int]], count: int = FEW) -> None:
    actual = Comparison(f"{name}, {what}")
    results = llm.generate(prompts, SamplingParams(max_tokens=count))
    for result, prompt in zip(results, prompts, strict=True):
        actual.add(result.token_ids, answer(name, tuple(prompt), result.token_ids, count))
    actual.finish()
    llm.engine.scheduler.check()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids(name: str, shared: Callable[..., LLM]) -> None:
    compare("three prompts", shared(name), name, oracle.prompts()[4:16:5])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel_set", kernel_sets.FAST)
def test_greedy_ids_of_twenty_prompts(name: str, kernel_set: str, make_strict: Callable[..., LLM]) -> None:
    """Runs every set of kernels, with blocks and chunks that cut prompts in the middle."""
    llm = make_strict(name, kernel_set, num_blocks=256, block_size=64, max_chunk=7)
    compare(f"twenty prompts, {kernel_set}", llm, name, oracle.prompts(), MANY)
    kernel_sets.check(llm, kernel_set)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("block_size", [16, 64])
def test_twenty_prompts_in_chunks_and_blocks(
    name: str, chunk: int, block_size: int, make: Callable[..., LLM]
) -> None:
    """Starts with an empty prefix cache, with one that has all prompts, and without one."""
    options = {"max_chunk": chunk, "block_size": block_size, "num_blocks": 16384 // block_size}
    llm, what = make(name, **options), f"chunks of {chunk}, blocks of {block_size}"
    compare(f"{what}, empty cache", llm, name, oracle.prompts(), MANY)
    assert llm.engine.scheduler.pool.num_cached > 0
    compare(f"{what}, everything cached", llm, name, oracle.prompts(), MANY)
    compare(
        f"{what}, no cache", make(name, enable_prefix_cache=False, **options), name, oracle.prompts(), MANY
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_twenty_prompts_in_every_company(name: str, make: Callable[..., LLM]) -> None:
    prompts = oracle.prompts()
    llm = make(name, num_blocks=1024, enable_prefix_cache=False)
    for prompt in prompts:
        compare("alone", llm, name, [prompt], MANY)
    compare("reversed", llm, name, prompts[::-1], MANY)
    compare("each twice", llm, name, [prompt for prompt in prompts for _ in range(2)], MANY)
    compare("three at a time", make(name, num_blocks=1024, max_seqs=3), name, prompts, MANY)
    compare("80 tokens per step", make(name, num_blocks=1024, max_batch_tokens=80), name, prompts, MANY)


@pytest.mark.parametrize("name", NAMES)
def test_batch_compositions(name: str, shared: Callable[..., LLM]) -> None:
    prompts = oracle.prompts()[2:12:3]
    compare("one after another", shared(name), name, prompts[:1])
    compare("together", shared(name), name, prompts)
    compare("reversed", shared(name), name, prompts[::-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("block_size", [16, 64])
def test_chunks_and_blocks(name: str, chunk: int, block_size: int, make: Callable[..., LLM]) -> None:
    llm = make(name, max_chunk=chunk, block_size=block_size, num_blocks=4096 // block_size)
    # One is longer than a chunk of 64, the other fills a block of 64 while it is answered.
    compare(f"chunks of {chunk}, blocks of {block_size}", llm, name, oracle.prompts()[10:16:5])


@pytest.mark.parametrize("name", NAMES)
def test_prefix_cache_states(name: str, make: Callable[..., LLM]) -> None:
    llm = make(name)
    prompts = oracle.prompts()[13:15]
    compare("empty cache", llm, name, prompts)
    assert llm.engine.scheduler.pool.num_cached > 0
    compare("everything cached", llm, name, prompts)
    longer = [prompts[0] + oracle.eval_tokens()[500:540]]
    compare("a cached beginning", llm, name, longer)
    compare("no cache", make(name, enable_prefix_cache=False), name, longer)


@pytest.mark.parametrize("name", NAMES)
def test_preemption_by_recomputation(name: str, make: Callable[..., LLM]) -> None:
    """The pool is too small for all: requests are preempted, computed again, and answer as before."""
    prompts = oracle.prompts()[8:14]
    llm = make(name, num_blocks=24, max_seqs=6)
    preempted = []
    preempt = llm.engine.scheduler._preempt
    llm.engine.scheduler._preempt = lambda request: (preempted.append(request.id), preempt(request))[1]  # type: ignore[method-assign]
    compare("preempted", llm, name, prompts)
    assert preempted
