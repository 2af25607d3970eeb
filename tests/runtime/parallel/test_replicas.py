"""Copies of a model in processes of their own: the ids of one; a replica that dies or hangs is named, and its requests are run again."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.engine import EngineDraining
from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.runtime.kv_transfer.prefill_decode import PrefillDecode
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel import replica_front
from gristmill.runtime.parallel.queue_cap import QueueCap
from gristmill.runtime.parallel.replicas import Replicas
from gristmill.runtime.parallel.route import PIECE, SLACK, Router
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import QueueFull
from gristmill.runtime.status import EngineStatus
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA, MODELS
from tests.runtime.parallel.test_ranks import is_gone

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=3500, ignore_eos=True)
"""Seconds on any machine: under way when something is done to its process."""
PROMPTS = oracle.prompts()[2:10]


def pids(replicas: Replicas) -> list[int]:
    return [replica.child.process.pid for replica in replicas._replicas]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Silence:
    """Instead of the module `select` of the front end: time passes for processes whose connections are in `silent`, and the others, however
    slow the machine makes them, are waited for."""

    POLLIN = select.POLLIN

    def __init__(self) -> None:
        self.silent: list[Any] = []

    def poll(self) -> Any:
        polled, heard = select.poll(), list[Any]()

        def register(connection: Any, events: int) -> None:
            polled.register(connection, events)
            heard.append(connection)

        def poll(milliseconds: int) -> list[tuple[int, int]]:
            while not (ready := polled.poll(20)) and heard[0] not in self.silent:
                pass
            return ready

        return SimpleNamespace(register=register, poll=poll)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Silence:
    made = Silence()
    monkeypatch.setattr(replica_front, "select", made)
    return made


async def sent(replicas: Replicas, count: int) -> None:
    """Waits until so many completions have been sent to replicas."""
    while sum(replica.unfinished for replica in replicas._replicas) < count:
        await asyncio.sleep(0)


@pytest.fixture
def start(policy: Policy) -> Iterator[Callable[..., Any]]:
    """Makes fronts over two processes, which are ended after the test."""
    fronts: list[Any] = []

    def make(kind: type, *arguments: Any, **options: Any) -> Any:
        given = {
            "dtype": "fp32",
            "num_blocks": 256,
            "policy": policy,
            "timeout": 60.0,
            "warm": "off",
            **options,
        }
        fronts.append(kind(MODELS / LLAMA, *arguments, **given))
        return fronts[-1]

    yield make
    for front in fronts:
        front.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main(), 120)

    asyncio.run(limited())


def test_replicas_give_the_ids_of_one_and_outlive_each_other(
    start: Callable[..., Any], shared: Callable[..., LLM], silence: Silence
) -> None:
    expected = shared(LLAMA).generate(PROMPTS, PARAMS)
    long = [done.token_ids for done in shared(LLAMA).generate(PROMPTS[:4], LONG)]
    replicas: Replicas = start(Replicas, 2)
    started = pids(replicas)

    async def main() -> None:
        done = await asyncio.gather(*(replicas.generate(prompt, PARAMS) for prompt in PROMPTS))
        assert [one.token_ids for [one] in done] == [one.token_ids for one in expected]
        both = await replicas.status()
        assert all(isinstance(one, EngineStatus) and one.cached_blocks for one in both), "both have worked"
        choices = await replicas.generate("The index", SamplingParams(max_tokens=4, n=2, temperature=1.0))
        assert [one.choice for one in choices] == [0, 1] and choices[0].text
        with pytest.raises(UsageError, match="prompt ids must be integers from 0 to 4095, got 99999"):
            await replicas.generate([99999])

        stream = replicas.stream(PROMPTS[0], ENDLESS)
        await anext(stream)
        await stream.aclose()
        assert [one.running for one in await replicas.status()] == [0, 0], "who leaves ends a request"

        begun = [replicas.stream(prompt, ENDLESS) for prompt in PROMPTS[:2]]
        for each in begun:
            await anext(each)
        unfinished = asyncio.gather(*(replicas.generate(prompt, LONG) for prompt in PROMPTS[:4]))
        await sent(replicas, 6)
        os.kill(started[1], signal.SIGSTOP)
        silence.silent.append(replicas._replicas[1].child.connection)
        again = await unfinished
        assert [one.token_ids for [one] in again] == long, "run again on the other one"
        ended = 0
        for each in begun:
            try:
                for _ in range(3):  # what had come before the end is one chunk
                    await anext(each)
                await each.aclose()
            except ReplicaError as error:
                assert str(error) == "replica 1 sent nothing for 60 s and was ended"
                ended += 1
        assert ended == 1, "what a caller has got is not taken back"
        assert isinstance((await replicas.status())[1], ReplicaError)
        assert (await replicas.generate(PROMPTS[0], PARAMS))[0].token_ids == expected[0].token_ids

        last = asyncio.ensure_future(replicas.generate(PROMPTS[0], ENDLESS))
        await sent(replicas, 1)
        os.kill(started[0], signal.SIGKILL)
        with pytest.raises(ReplicaError, match=r"replica 0 died \(SIGKILL\) with its requests"):
            await last
        with pytest.raises(
            ReplicaError, match=r"no replica is left: replica 0 died .*; replica 1 sent nothing"
        ):
            await replicas.generate(PROMPTS[0])

    run(main)
    replicas.close()
    until(lambda: all(map(is_gone, started)))


def test_calls_reach_every_replica(start: Callable[..., Any], tmp_path: Path) -> None:
    replicas: Any = start(Replicas, 2, route="round_robin", max_queued=3)

    async def main() -> None:
        await asyncio.gather(*(replicas.generate(prompt, PARAMS) for prompt in PROMPTS[:2]))
        assert all(isinstance(one, EngineStatus) and one.cached_blocks for one in await replicas.status())
        assert await replicas.reset_prefix_cache() == [None, None]
        assert [one.cached_blocks for one in await replicas.status()] == [0, 0]
        for rows in await replicas.explain():
            assert {"op", "kernel", "reason"} <= rows[0].keys()

        assert await replicas.pause("keep") == [None, None]
        assert [one.state for one in await replicas.status()] == ["paused"] * 2
        waiting = [
            asyncio.ensure_future(replicas.generate(prompt, PARAMS, request_id=f"r{i}"))
            for i, prompt in enumerate(PROMPTS[:3])
        ]
        await sent(replicas, 3)
        with pytest.raises(UsageError, match="request id 'r1' is in use by an unfinished request"):
            await replicas.generate(PROMPTS[0], PARAMS, request_id="r1")
        assert sorted(one.waiting for one in await replicas.status()) == [1, 2]
        with pytest.raises(QueueFull, match="max_queued"):
            await replicas.generate(PROMPTS[0], PARAMS)
        dumps = await replicas.dump()
        assert all("engine thread is at" in text for text in dumps)
        assert "r0" in dumps[0] + dumps[1], "the engine has the caller's name"
        assert await replicas.resume() == [None, None]
        assert len(await asyncio.gather(*waiting)) == 3
        await replicas.generate(PROMPTS[0], PARAMS, request_id="r1")

        trace = asyncio.ensure_future(replicas.profile(3, tmp_path / "trace.json"))
        while not all((tmp_path / f"trace-{number}.json").exists() for number in range(2)):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # the file is made a line before the profile is taken
        [refused, *_] = await replicas.profile(3, tmp_path / "other.json")
        assert isinstance(refused, UsageError) and "another profile" in str(refused)
        await asyncio.gather(*(replicas.generate(prompt, PARAMS) for prompt in PROMPTS[:2]))
        files = await trace
        assert files == [str(tmp_path / f"trace-{number}.json") for number in range(2)]
        assert all('"traceEvents"' in Path(file).read_text() for file in files)
        assert isinstance((await replicas.profile(1, tmp_path / "no" / "trace.json"))[0], OSError)
        with pytest.raises(UsageError, match="level must be one of debug, info, warning, error"):
            await replicas.set_log_level("loud")

        [first, second] = await replicas.update_weights("/nowhere")
        assert isinstance(first, Exception) and "nowhere" in str(first) and isinstance(second, Exception)
        assert await replicas.sleep(1) == [None, None]
        assert [one.state for one in await replicas.status()] == ["sleeping"] * 2
        assert await replicas.wake_up() == [None, None]
        os.kill(pids(replicas)[1], signal.SIGKILL)
        [alive, dead] = await replicas.reset_prefix_cache()
        assert alive is None and isinstance(dead, ReplicaError)
        assert (await replicas.drain(1.0))[0] is None
        with pytest.raises(EngineDraining):
            await replicas.generate(PROMPTS[0], PARAMS)

    run(main)


def test_caps_of_the_queue() -> None:
    cap = QueueCap(3, 100)
    cap.enter("a", ["a", "a/1"], 30)
    with pytest.raises(QueueFull, match="2 requests are waiting, with its 2 completions more than 3"):
        cap.enter("b", ["b", "b/1"], 1)
    with pytest.raises(QueueFull, match="60 prompt tokens are waiting, with its 41 more than"):
        cap.enter("c", ["c"], 41)
    cap.enter("d", ["d"], 40)
    with pytest.raises(QueueFull, match="3 requests are waiting, which is max_queued"):
        cap.enter("e", ["e"], 1)
    cap.leave(["a", "a/1", "d"])
    cap.leave(["a"])
    assert len(cap) == 0
    cap.enter("f", ["f"], 1000)  # alone


def test_a_prompt_that_one_process_has_computed_is_loaded_by_another(
    start: Callable[..., Any], shared: Callable[..., LLM], silence: Silence, tmp_path: Path
) -> None:
    prompts = [oracle.window(i)[: 70 + i] for i in range(6)]
    expected = [done.token_ids for done in shared(LLAMA).generate(prompts, PARAMS)]
    front: PrefillDecode = start(PrefillDecode, f"file:{tmp_path},timeout=60")
    first, second = pids(front.prefill)[0], pids(front.decode)[0]

    async def answer(prompt: list[int]) -> tuple[int, ...]:
        return tuple([token async for chunk in front.stream(prompt, PARAMS) for token in chunk.token_ids])

    async def loaded() -> int:
        [status] = await front.decode.status()
        assert isinstance(status, EngineStatus) and status.kv_transfer is not None
        return status.kv_transfer.loaded_tokens

    async def main() -> None:
        assert await asyncio.gather(*map(answer, prompts[:2])) == expected[:2]
        assert await loaded() == 128 and front.computed_again == 0
        whole = {file: file.read_bytes() for file in tmp_path.iterdir()}
        for file, data in whole.items():
            file.write_bytes(data[: len(data) // 2])
        task = asyncio.ensure_future(answer(prompts[2]))
        assert await task == expected[2] and await loaded() == 192
        os.kill(first, signal.SIGSTOP)
        silence.silent.append(front.prefill._replicas[0].child.connection)
        assert await asyncio.gather(*map(answer, prompts[3:5])) == expected[3:5]
        assert front.computed_again == 2 and await loaded() == 192
        assert await answer(prompts[5]) == expected[5], "at once"
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ReplicaError, match="replica 0 died"):
            await answer(prompts[0])

    run(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count"),
        ({"count": 1, "timeout": 0}, "timeout must be seconds, more than 0, got 0"),
        ({"count": 1, "route": "best"}, "route must be one of prefix, round_robin, got 'best'"),
        ({"count": 2, "device": "cuda", "tensor_parallel": 64}, "2 replicas need 64 GPUs each"),
    ],
)
def test_wrong_calls_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Replicas(MODELS / LLAMA, **options)
    with pytest.raises(UsageError, match="host:1GiB is memory of one"):
        PrefillDecode(MODELS / LLAMA, "host:1GiB")


@pytest.mark.slow
def test_what_a_replica_refuses_at_load_is_raised(start: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="unknown KV store 'tape'"):
        start(Replicas, 2, kv_transfer="tape")


@pytest.mark.slow
def test_replicas_of_two_ranks_without_retries(start: Callable[..., Any], shared: Callable[..., LLM]) -> None:
    expected = shared(LLAMA).generate(PROMPTS[:4], PARAMS)
    replicas: Replicas = start(Replicas, 2, tensor_parallel=2, retry=False, route="round_robin")

    async def main() -> None:
        done = await asyncio.gather(*(replicas.generate(prompt, PARAMS) for prompt in PROMPTS[:4]))
        assert [one.token_ids for [one] in done] == [one.token_ids for one in expected]
        calls = [asyncio.ensure_future(replicas.generate(prompt, LONG)) for prompt in PROMPTS[:4]]
        await sent(replicas, 4)
        os.kill(pids(replicas)[0], signal.SIGKILL)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, ReplicaError) for one in ended] == [True, False, True, False]

    run(main)


def test_routes() -> None:
    turns = Router("round_robin")
    assert [turns.choose([1], {0: 5, 2: 0}) for _ in range(3)] == [0, 2, 0]

    router, idle = Router("prefix"), {0: 0, 1: 0, 2: 0}
    texts = [list(range(i, i + 3 * PIECE)) for i in range(3)]
    owners = [router.choose(text, idle) for text in texts]
    assert sorted(owners) == [0, 1, 2], "prompts without a common prefix are spread"
    for text, owner in zip(texts, owners, strict=True):
        assert router.choose(text[: 2 * PIECE] + [7] * 500, idle) == owner
    assert router.choose(texts[0], {**idle, owners[0]: SLACK}) == owners[0]
    moved = router.choose(texts[0], {**idle, owners[0]: SLACK + 1})
    assert moved != owners[0], "too much to do"
    assert router.choose(texts[0], idle) == moved, "which has the prefix now"
    left = {replica: 0 for replica in idle if replica != owners[1]}
    assert router.choose(texts[1], left) in left, "the one with the prefix is dead"
    assert router.choose("a" * 200, idle) == router.choose("a" * 200 + "b", idle)
    router.choose([], idle)
