"""Sleep and wake-up: memory that is given back, the same answers afterwards, what waits and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from gristmill.runtime import residency
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.weight_update import model_tensors
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS, NAMES, window

PROMPT = window(5, 70)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def answer(llm: LLM) -> tuple[int, ...]:
    return llm.generate([PROMPT], PARAMS)[0].token_ids


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decode_graphs", [True, False])
def test_discarded_weights_come_back_with_an_update(
    name: str, decode_graphs: bool, make: Callable[..., LLM]
) -> None:
    llm = make(name, quant="int4_g128", decode_graphs=decode_graphs)
    engine, expected = llm.engine, answer(llm)
    weights, cache = engine.status().weight_bytes, engine.status().cache_bytes
    engine.sleep(level=2)
    status = engine.status()
    assert (status.state, status.weight_bytes, status.cache_bytes) == ("sleeping", 0, 0) and weights and cache
    assert not any(tensor.numel() for tensor in model_tensors(llm.model))

    with pytest.raises(UsageError, match=r"call wake_up\(\['weights'\]\) before update_weights"):
        engine.update_weights(MODELS / name)
    engine.wake_up(["weights"])
    assert engine.status().weight_bytes == weights and engine.status().cache_bytes == 0
    with pytest.raises(UsageError, match="the engine sleeps: call wake_up"):
        answer(llm)
    engine.wake_up()
    assert engine.status().state == "outdated" and engine.paused
    with pytest.raises(UsageError, match=r"sleep\(level=2\) discarded the weights: call update_weights"):
        answer(llm)
    engine.update_weights(MODELS / name)
    assert engine.status().state == "running" and engine.status().cache_bytes == cache
    assert answer(llm) == expected
    assert (engine.runner.decode is not None) == decode_graphs
    engine.scheduler.check()


def test_level_1_keeps_the_weights(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, kv_dtype="fp8_token_head")
    expected, weights = answer(llm), llm.engine.status().weight_bytes
    for _ in range(2):
        llm.engine.sleep()
        assert llm.engine.status().weight_bytes == weights and llm.engine.status().cache_bytes == 0
        assert llm.engine.runner.cache.layers == []
        llm.engine.wake_up()
        assert answer(llm) == expected


def test_weights_in_host_memory(make: Callable[..., LLM]) -> None:
    """What a GPU does at level 1, on a CPU: every tensor returns with its values, views of one storage included."""
    llm = make(DEEPSEEK, quant="int4_g128", decode_graphs=False)
    expected, before = answer(llm), [tensor.clone() for tensor in model_tensors(llm.model)]
    shared = len({tensor.untyped_storage().data_ptr() for tensor in model_tensors(llm.model)})
    llm.engine.residency._release_weights(keep=True)
    llm.engine.residency.absent.add("weights")
    assert llm.engine.status().weight_bytes == 0 and llm.engine.paused
    llm.engine.wake_up()
    after = model_tensors(llm.model)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in after}) == shared
    assert answer(llm) == expected


def test_waking_without_memory_can_be_repeated(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(LLAMA, decode_graphs=False)
    expected, empty, calls = answer(llm), residency.memory.empty, []

    def short(*arguments: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no memory")
        return empty(*arguments)  # type: ignore[arg-type]

    llm.engine.residency._release_weights(keep=True)
    llm.engine.residency.absent.add("weights")
    monkeypatch.setattr(residency.memory, "empty", short)
    with pytest.raises(torch.OutOfMemoryError):
        llm.engine.wake_up()
    assert llm.engine.status().state == "sleeping"
    llm.engine.wake_up()
    assert answer(llm) == expected


def test_requests_wait_while_the_engine_sleeps(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA)
    engine, expected = llm.engine, answer(llm)
    engine.add_request("begun", PROMPT, PARAMS)
    engine.step()
    with pytest.raises(UsageError, match="sleep while requests have begun and not ended: pause"):
        engine.sleep()
    engine.abort()
    engine.sleep()
    engine.add_request("waits", PROMPT, PARAMS)
    assert engine.step() == [] and engine.paused and engine.has_unfinished()
    engine.wake_up()
    ids: list[int] = []
    while engine.has_unfinished():
        ids += [token for output in engine.step() for token in output.new_ids]
    assert tuple(ids) == expected


def test_status(make: Callable[..., LLM]) -> None:
    engine = make(LLAMA, max_seqs=2, max_batch_tokens=100, max_model_len=500).engine
    for name in "abc":
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    status = engine.status()
    assert (status.running, status.waiting, status.waiting_tokens, status.used_blocks) == (0, 3, 210, 0)
    assert (status.num_blocks, status.block_size, status.max_seqs, status.max_batch_tokens) == (
        256,
        16,
        2,
        100,
    )
    assert status.max_request_tokens == 500 and status.state == "running"
    engine.step()
    status = engine.status()
    assert (status.running, status.waiting, status.used_blocks) == (2, 1, 7)
    while engine.has_unfinished():
        engine.step()
    status = engine.status()
    assert (status.running, status.waiting, status.waiting_tokens) == (0, 0, 0)
    assert (status.used_blocks, status.cached_blocks) == (0, 4)
    engine.pause()
    assert engine.status().state == "paused"
    engine.drain()
    assert engine.status().state == "draining"


def test_refusals(make: Callable[..., LLM]) -> None:
    engine = make(LLAMA).engine
    for level in (0, 3, True, "1"):
        with pytest.raises(UsageError, match="level must be 1 or 2"):
            engine.sleep(level)  # type: ignore[arg-type]
    engine.wake_up()
    with pytest.raises(UsageError, match="parts must be a list of some of weights, kv_cache; got kv"):
        engine.wake_up(["kv"])  # type: ignore[list-item]
    engine.sleep()
    with pytest.raises(UsageError, match="the engine sleeps already: call wake_up first"):
        engine.sleep()


def test_async_engine(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA)
    expected = answer(llm)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            await engine.call(lambda e: e.sleep(2))
            assert (await engine.check_health(60)).state == "sleeping"
            waiting = asyncio.create_task(engine.generate(PROMPT, PARAMS))
            await asyncio.sleep(0.05)
            assert not waiting.done() and (await engine.check_health()).waiting == 1
            await engine.call(lambda e: e.wake_up())
            await engine.call(lambda e: e.update_weights(MODELS / LLAMA))
            assert (await waiting)[0].token_ids == expected
            with pytest.raises(UsageError, match="level must be 1 or 2"):
                await engine.call(lambda e: e.sleep(5))
            assert (await engine.generate(PROMPT, PARAMS))[0].token_ids == expected

    asyncio.run(main())


def test_health_of_a_thread_that_does_not_answer(make: Callable[..., LLM]) -> None:
    import threading

    llm, go = make(LLAMA), threading.Event()

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            busy = asyncio.create_task(engine.call(lambda _: go.wait(60)))
            await asyncio.sleep(0.05)
            with pytest.raises(TimeoutError):
                await engine.check_health(0.05)
            go.set()
            await busy
            assert (await engine.check_health(60)).running == 0

    asyncio.run(main())
