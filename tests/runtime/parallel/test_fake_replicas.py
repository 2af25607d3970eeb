"""The front end of replicas over processes without a model: deaths, restarts, leaks, and that no request gets another one's tokens."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.runtime.parallel import replica_front, restarts
from gristmill.runtime.parallel.replicas import Replicas
from gristmill.runtime.parallel.restarts import WINDOW_SECONDS, Restarts
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.oracle import LLAMA, MODELS
from tests.runtime.parallel import fake_replica
from tests.runtime.parallel.fake_replica import HANG, POISON, REFUSED
from tests.runtime.parallel.test_ranks import is_gone
from tests.runtime.parallel.test_replicas import until


class FakeReplicas(Replicas):
    """Replicas of nothing."""

    _module = fake_replica.__name__


Make = Callable[..., FakeReplicas]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(restarts, "FIRST_SECONDS", 0.02)
    fronts: list[FakeReplicas] = []

    def start(count: int = 1, **options: Any) -> FakeReplicas:
        given = {"device": "cpu", "timeout": 20.0, "max_queued": 100_000, **options}
        fronts.append(FakeReplicas(MODELS / LLAMA, count, **given))
        return fronts[-1]

    yield start
    for front in fronts:
        front.close()


def run(main: Any, seconds: float = 60.0) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main, seconds)

    return asyncio.run(limited())


def pid(front: FakeReplicas, number: int = 0) -> int:
    return front._replicas[number].child.process.pid


async def echoes(front: FakeReplicas, count: int, tokens: int = 4, at_once: int = 10_000) -> int:
    """How many of `count` requests got a token that is not theirs; every third caller leaves early."""
    wrong, numbers = 0, iter(range(count))

    async def one(number: int) -> None:
        nonlocal wrong
        prompt = [1000 + number % 60, 1000 + number // 60 % 1000, 1000 + number // 60_000]
        stream = front.stream(prompt, SamplingParams(max_tokens=tokens), request_id=f"r{number % 20_000}")
        got: list[int] = []
        async for chunk in stream:
            got += chunk.token_ids
            if number % 3 == 0:
                break
        await stream.aclose()
        wrong += got != [prompt[place % 3] for place in range(len(got))] or not got
        wrong += number % 3 != 0 and len(got) != tokens

    async def several() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(several() for _ in range(at_once)))
    return wrong


def test_loading_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each replica, and again when one is started again."""
    monkeypatch.setenv("FAKE_WEIGHTS", "3")
    told: list[tuple[int, str, int, int]] = []
    front = make(2, restarts=1, on_progress=lambda *progress: told.append(progress))
    rows = [("weights", done, 3) for done in range(3)]
    for number in range(2):
        assert [one[1:] for one in told if one[0] == number] == rows
    os.kill(pid(front, 1), signal.SIGKILL)
    until(lambda: [one[1:] for one in told if one[0] == 1] == 2 * rows)


def test_nobody_gets_the_tokens_of_another_one(make: Make) -> None:
    assert run(echoes(make(2), 10_000)) == 0


def test_the_check_sees_tokens_of_another_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that are used again: what is under way for a caller who has left reaches the next one of this name."""
    monkeypatch.setattr(replica_front.ReplicaFront, "_id", lambda self, name: name)
    front = make()

    async def main() -> bool:
        for number in range(200):
            stream = front.stream([1 + number], SamplingParams(max_tokens=500), request_id="x")
            first = (await anext(stream)).token_ids
            if set(first) != {1 + number}:
                return True
            await stream.aclose()
        return False

    assert run(main())


def test_streams_end_when_the_engine_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 of them are open: those that have got something end with an error, and the engine comes back."""
    monkeypatch.setenv("FAKE_STEP", "0.01")
    events: list[Any] = []
    front = make(restarts=2, timeout=1000.0, on_event=lambda event, **values: events.append((event, values)))
    first = pid(front)

    async def main() -> None:
        streams = [front.stream([1000 + i], SamplingParams(max_tokens=100_000)) for i in range(200)]
        await asyncio.gather(*map(anext, streams))
        os.kill(first, signal.SIGKILL)

        async def rest(stream: Any) -> str:
            try:
                async for _ in stream:
                    pass
            except ReplicaError as error:
                return str(error)
            return "it went on"

        assert set(await asyncio.gather(*map(rest, streams))) == {
            "replica 0 died (SIGKILL) with its requests"
        }  # without a time-out, for which `run` would not wait
        while not front._loads():
            await asyncio.sleep(0.01)
        [done] = await front.generate([1007, 1008], SamplingParams(max_tokens=4))
        assert done.token_ids == (1007, 1008, 1007, 1008)

    run(main())
    until(lambda: len(events) == 2)
    assert [event for event, _ in events] == ["replica_died", "replica_restarted"]
    assert events[0][1] == {
        "replica": 0,
        "alive": 0,
        "restarted": True,
        "error": "replica 0 died (SIGKILL) with its requests",
    }
    assert events[1][1]["alive"] == 1 and is_gone(first) and pid(front) != first


def test_requests_that_got_nothing_are_run_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP", "1.0")
    front = make(restarts=2)

    async def main() -> None:
        tasks = [
            asyncio.ensure_future(front.generate([1000 + i], SamplingParams(max_tokens=1))) for i in range(50)
        ]
        await asyncio.sleep(0.2)
        os.kill(pid(front), signal.SIGKILL)
        for number, [done] in enumerate(await asyncio.gather(*tasks)):
            assert done.token_ids == (1000 + number,)

    run(main())


def test_an_engine_that_hangs_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lives, begin = itertools.count(1), replica_front.ReplicaFront.__init__

    def patient(front: Any, child: Any, prompts: Any, cap: Any, timeout: float, *others: Any) -> None:
        """The three that the request hangs are noticed soon; one that a busy machine stops for as long is not taken for one of them."""
        begin(front, child, prompts, cap, timeout if next(lives) <= 3 else 30.0, *others)

    monkeypatch.setattr(replica_front.ReplicaFront, "__init__", patient)
    front = make(restarts=9, timeout=1.5)
    first = pid(front)

    async def main() -> None:
        with pytest.raises(ReplicaError, match=r"replica 0 (sent nothing for 1.5 s|died)"):
            await front.generate([HANG])
        while not front._loads():
            await asyncio.sleep(0.01)
        assert (await front.generate([1000], SamplingParams(max_tokens=1)))[0].token_ids == (1000,)

    run(main())
    assert is_gone(first)


def test_a_replica_that_is_started_again_is_as_it_was(make: Make) -> None:
    """Weights, the level of the log, and what was not taken back; in their order, before it gets requests."""
    front = make(restarts=9)

    async def main() -> list[Any]:
        await front.update_weights("old")
        await front.pause("keep")
        await front.set_log_level("error")
        await front.update_weights("new")
        await front.resume()
        await front.reset_prefix_cache()
        first = pid(front)
        os.kill(first, signal.SIGKILL)
        while not front._loads() or pid(front) == first:
            await asyncio.sleep(0.01)
        [calls] = await front.dump()
        return list(calls)  # type: ignore[call-overload]

    calls = run(main())
    logging.getLogger("gristmill").setLevel(logging.NOTSET)
    assert [(name, given) for name, given in calls[:-1]] == [
        ("set_log_level", {"level": "error"}),
        ("update_weights", {"path": "new"}),
    ]


def visible(front: FakeReplicas) -> list[str]:
    """The GPUs that each replica sees."""
    texts = [Path(f"/proc/{pid(front, number)}/environ").read_bytes() for number in range(2)]
    return [text.split(b"CUDA_VISIBLE_DEVICES=")[1].split(b"\0")[0].decode() for text in texts]


@pytest.mark.usefixtures("own_processes")  # whose environment the system shows
@pytest.mark.parametrize(
    ("given", "skip", "expected"), [("", 0, ["0", "1"]), ("5,3,GPU-ab", 1, ["3", "GPU-ab"])]
)
def test_replicas_have_gpus_of_their_own_also_when_started_again(
    given: str, skip: int, expected: list[str], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    front = make(2, device="cuda", skip=skip, restarts=9, route="round_robin")
    assert visible(front) == expected
    first = pid(front, 1)

    async def main() -> None:
        os.kill(first, signal.SIGKILL)
        while len(front._loads()) < 2 or pid(front, 1) == first:
            assert (await front.generate([1000], SamplingParams(max_tokens=1)))[0].token_ids == (1000,)
            await asyncio.sleep(0.01)
        assert await echoes(front, 20) == 0

    run(main())
    assert visible(front) == expected


def test_a_message_that_cannot_be_handled_ends_the_replica(make: Make) -> None:
    """Whoever waits gets an error, and it is started again; also when on_event fails."""

    def fails(event: str, **values: Any) -> None:
        raise RuntimeError("planted")

    front = make(restarts=9, on_event=fails)

    async def main() -> None:
        first = pid(front)
        [answer] = await front.explain()
        assert isinstance(answer, ReplicaError)
        assert "could not be handled" in str(answer)
        while not front._loads() or pid(front) == first:
            await asyncio.sleep(0.01)
        assert (await front.generate([1000], SamplingParams(max_tokens=1)))[0].token_ids == (1000,)

    run(main())


def test_a_request_that_ends_every_engine_is_run_three_times(make: Make) -> None:
    events: list[str] = []
    front = make(restarts=9, on_event=lambda event, **values: events.append(event))

    async def main() -> None:
        with pytest.raises(ReplicaError, match=r"replica 0 died \(exit status 3\)"):
            await front.generate([POISON])
        with pytest.raises(ReplicaError, match=r"no replica is left: replica 0 died"):
            await front.generate([1000])

    run(main())
    until(lambda: events.count("replica_died") == 3)


def test_an_engine_that_dies_again_and_again_is_given_up(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lives = tmp_path / "lives"
    lives.write_text("00001")
    monkeypatch.setenv("FAKE_LIVES", str(lives))
    events: list[Any] = []
    front = make(restarts=2, on_event=lambda event, **values: events.append((event, values)))

    async def main() -> None:
        with pytest.raises(ReplicaError):
            await front.generate([POISON])
        with pytest.raises(ReplicaError, match="no replica is left"):
            await front.generate([1000])

    run(main())
    until(lambda: len(events) == 3)
    assert [event for event, _ in events] == ["replica_died", "replica_died", "replica_given_up"]
    assert not events[-1][1]["restarted"] and "no life is left" in events[-1][1]["error"]


def test_the_time_between_restarts_doubles() -> None:
    policy = Restarts(3)
    assert [policy.died(0, float(now)) for now in range(4)] == [0.5, 1.0, 2.0, None]
    assert policy.died(1, 3.0) == 0.5, "each has its own"
    assert policy.died(0, 4 + WINDOW_SECONDS) == 0.5, "it has lived for long"
    assert Restarts(0).died(0, 0.0) is None


def test_a_refused_prompt_is_its_own_error(make: Make) -> None:
    front = make()

    async def main() -> None:
        refused, good = await asyncio.gather(
            front.generate([REFUSED]),
            front.generate([1000], SamplingParams(max_tokens=2)),
            return_exceptions=True,
        )
        assert isinstance(refused, UsageError) and str(refused) == "this prompt is refused"
        assert isinstance(good, list) and good[0].token_ids == (1000, 1000)
        assert not front._loads()[0], "nothing is left of it"

    run(main())


def leftovers() -> tuple[int, int, int]:
    """Descriptors, threads, and kilobytes of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * 4


def test_nothing_is_left(make: Make) -> None:
    """Of a front end, and of 20,000 requests."""
    leaks(make, 20_000)


@pytest.mark.slow
def test_nothing_is_left_of_very_many(make: Make) -> None:
    leaks(make, 200_000)


def leaks(make: Make, count: int) -> None:
    run(echoes(make(), 10_000, 2, 100))
    before = leftovers()
    front = make()
    assert run(echoes(front, count, 2, 100), 600) == 0
    assert front._loads() == {0: 0} and not front._names and not len(front._cap)
    process = pid(front)
    front.close()
    deadline = time.monotonic() + 60
    while (after := leftovers())[:2] != before[:2]:
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.01)
    assert is_gone(process)
    assert after[2] - before[2] < 8_000, "kilobytes"
