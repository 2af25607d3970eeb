"""The load: when each request is sent, whether the server keeps up or not.

At a request rate the requests are due at times that do not depend on the answers, and every latency counts from the time at which a request was
due. So a server that stalls, or a limit of concurrency, shows in the latencies of all the requests that had to wait (no coordinated omission).
Without a rate, the next request is sent when one ends, and is due at that moment.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gristmill.runtime.errors import UsageError
from gristmill.tools.bench_serve.client import Answer, Client

EARLY = 0.0005
"""Seconds that a request may be sent before it is due: timers of event loops count milliseconds."""


@dataclass(frozen=True)
class Load:
    """How much.

    Attributes:
        rate: requests per second; None = as many as `concurrency` allows.
        burstiness: of their intervals, a gamma distribution: 1 = a Poisson process, less = more bursts, more = more even.
        concurrency: the most requests at a time; None = any number, for a rate.
        requests: how many; None = as many as are due within `seconds`.
        seconds: no request is sent after them; None = no limit.
    """

    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    requests: int | None = None
    seconds: float | None = None
    seed: int = 0


@dataclass
class Run:
    """What happened.

    Attributes:
        answers: of all requests that ended, in the order in which they ended.
        begin, end: when the first was due, and the last ended.
        interrupted: requests that had not ended when the run was interrupted; None = it was not.
        cpu: seconds of this process's CPU time.
    """

    answers: list[Answer] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    interrupted: int | None = None
    cpu: float = 0.0


def arrivals(load: Load) -> Iterator[float]:
    """Seconds from the beginning at which requests are due, endless."""
    assert load.rate is not None
    source, due = random.Random(load.seed), 0.0
    while True:
        yield due
        due += source.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness))


async def run(
    client: Client,
    requests: Iterator[bytes],
    load: Load,
    on_end: Callable[[Answer], None] = lambda answer: None,
) -> Run:
    """Send the load, until it is done or SIGINT comes."""
    done, loop = Run(), asyncio.get_running_loop()
    if load.requests is not None:
        requests = itertools.islice(requests, load.requests)
    _open_files(load)
    before = _cpu()
    done.begin = done.end = time.perf_counter()
    sending = asyncio.ensure_future(_send_all(client, requests, load, done, on_end))
    loop.add_signal_handler(signal.SIGINT, sending.cancel)
    try:
        await sending
    except asyncio.CancelledError:
        done.interrupted = done.interrupted or 0
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    done.cpu = _cpu() - before
    return done


async def _send_all(
    client: Client, requests: Iterator[bytes], load: Load, done: Run, on_end: Callable[[Answer], None]
) -> None:
    end = float("inf") if load.seconds is None else done.begin + load.seconds

    async def one(request: bytes, due: float) -> None:
        answer = Answer(due)
        await client.send(request, answer)
        answer.due = min(due, answer.sent)
        done.answers.append(answer)
        done.end = answer.ended
        on_end(answer)

    async def in_turn() -> None:
        for request in requests:
            if (now := time.perf_counter()) >= end:
                return
            await one(request, now)

    async def at_rate() -> None:
        free = None if load.concurrency is None else asyncio.Semaphore(load.concurrency)

        async def when_free(request: bytes, due: float) -> None:
            if free is None:
                await one(request, due)
                return
            async with free:
                await one(request, due)

        for offset, request in zip(arrivals(load), requests, strict=False):
            due = done.begin + offset
            if due >= end:
                return
            while (early := due - time.perf_counter()) > EARLY:
                await asyncio.sleep(early)
            tasks.add(task := asyncio.ensure_future(when_free(request, due)))
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(0)

    tasks: set[asyncio.Future[None]] = set()
    if load.rate is None:
        tasks |= {asyncio.ensure_future(in_turn()) for _ in range(load.concurrency or 1)}
    try:
        if load.rate is not None:
            await at_rate()
        while tasks:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            tasks -= ended
            for task in ended:
                task.result()
    except asyncio.CancelledError:
        done.interrupted = len(tasks)
        raise
    finally:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def warm_up(client: Client, requests: Iterator[bytes], count: int, concurrency: int) -> None:
    """Send requests that do not count.

    Raises:
        UsageError: one failed: the message is the server's.
    """
    if count:
        done = await run(client, requests, Load(requests=count, concurrency=min(count, concurrency)))
        for answer in done.answers:
            if answer.error:
                raise UsageError(f"the server does not answer: {answer.error}: {answer.message}")
        if done.interrupted is not None:
            raise KeyboardInterrupt


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _open_files(load: Load) -> None:
    """As many open files as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if load.concurrency is not None and load.concurrency + 64 > hard > 0:
        raise UsageError(
            f"{load.concurrency} connections need more open files than the {hard} that ulimit -n allows"
        )
