"""Several copies of a model, each in a process of its own, with one front end: data parallelism without communication.

async with Replicas("DIR", count=2, device="cuda") as replicas:
    async for chunk in replicas.stream("The index", SamplingParams(max_tokens=32)):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.completion import Chunk, Completion, GrowingCompletion
from gristmill.runtime.devices import parse_device
from gristmill.runtime.engine import PauseMode
from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.runtime.hub import local_model
from gristmill.runtime.integers import as_prompt, plain
from gristmill.runtime.llm import Prompt
from gristmill.runtime.parallel.calls import set_log_level
from gristmill.runtime.parallel.child_process import ChildProcess, Failure, end_all, spawn, status
from gristmill.runtime.parallel.driver import LOADING
from gristmill.runtime.parallel.route import Route, Router
from gristmill.runtime.residency import Part
from gristmill.runtime.sampling_params import SamplingParams, check_integers
from gristmill.runtime.scheduler import QueueFull
from gristmill.runtime.status import EngineStatus

Call = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[Any]"]  # where the answers to a request go


@dataclass(slots=True)
class _Replica:
    """A process, and its unfinished requests. `error` is why it serves no more."""

    child: ChildProcess
    outgoing: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    calls: dict[str, Call] = field(default_factory=dict)
    error: ReplicaError | None = None


class Replicas:
    """Copies of a model with one front end. Each decides for itself; they share nothing but, if asked for, a store of `kv_transfer`.

    Args:
        model, options: arguments of `LLM`, for each; a model of the hub is fetched once. On GPUs, replica r has those from r * tensor_parallel
            on. max_queued and max_queued_tokens are those of all replicas together: each has its share.
        count: number of replicas.
        route: ``prefix``: a request goes to the replica that was sent the longest prefix of its prompt, unless that has far more to do than
            others; ``round_robin``: in turn.
        retry: requests of a replica that dies are run again on another one, where their caller has got nothing yet. False = they end with
            ReplicaError.
        timeout: seconds without a message, and a tenth of the seconds for loading, after which a replica counts as dead.
        skip: GPUs that are left to others, the first ones.

    Raises:
        UsageError: as `LLM`; too few GPUs. ReplicaError: a replica died, or did not load the model in time.
    """

    def __init__(
        self,
        model: str | Path,
        count: int,
        *,
        route: Route = "prefix",
        retry: bool = True,
        timeout: float = 60.0,
        skip: int = 0,
        **options: Any,
    ) -> None:
        count, skip = plain(count), plain(skip)
        check_integers(count=count)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e6:
            raise UsageError(f"timeout must be seconds, more than 0, got {timeout!r}")
        EngineConfig.of(options)  # before processes are started
        model = local_model(model)  # fetched once, not by each of them
        options["device"] = device_of(options)
        self._retry, self._timeout = retry, timeout
        self._router, self._numbers, self._lock = Router(route), itertools.count(), threading.Lock()
        self._names: set[str] = set()  # those that callers gave to unfinished requests
        self._replicas: list[_Replica] = []
        try:
            for number, environment in enumerate(_environments(count, skip, options)):
                self._replicas.append(
                    _Replica(spawn("gristmill.runtime.parallel.replica", number, env=environment))
                )
                own = {**options, **_share(options, number, count)}
                self._replicas[-1].child.connection.send((model, own, count, LOADING * timeout))
            self._await_loaded(time.monotonic() + LOADING * timeout)
        except BaseException:
            end_all(replica.child for replica in self._replicas)
            raise
        for replica in self._replicas:
            for work in (self._send, self._receive):
                threading.Thread(target=work, args=(replica,), daemon=True).start()

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """As `AsyncEngine.stream`, by one of the replicas. ReplicaError names it if it dies, and none can take its place. QueueFull: none has room
        in its queue."""
        given = as_prompt(prompt)
        full: set[int] = set()
        with self._name(request_id):
            while True:
                begun = False
                try:
                    items = self._items(given, "stream", given, params, priority, request_id, full=full)
                    async with aclosing(items):
                        async for item in items:
                            begun = True
                            yield item
                    return
                except ReplicaError:
                    if begun or not self._retry or not self._loads():
                        raise
                    full.clear()
                except QueueFull:
                    if not self._loads().keys() - full:
                        raise

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> list[Completion]:
        """As `AsyncEngine.generate`, of a text without prompt_ids. What a replica that dies has computed is computed again by another one,
        unless `retry` is False."""
        given = as_prompt(prompt)
        while True:
            growing = defaultdict[int, GrowingCompletion](GrowingCompletion)
            try:
                stream = self.stream(given, params, priority=priority, request_id=request_id)
                async with aclosing(stream):
                    async for chunk in stream:
                        growing[chunk.choice].add(chunk)
            except ReplicaError:
                if not self._retry or not self._loads():
                    raise
                continue
            ids = () if isinstance(given, str) else given
            return [growing[choice].completion(ids) for choice in sorted(growing)]

    async def save(self, prompt: Prompt, seconds: float) -> bool:
        """Compute a prompt, and wait up to `seconds` for its blocks to be in the stores of `kv_transfer`; whether they are."""
        given = as_prompt(prompt)
        return [bool(item) async for item in self._items(given, "save", given, seconds)][0]

    async def status(self) -> list[EngineStatus | BaseException]:
        """For each replica its status, or the ReplicaError that says why it serves no more."""
        return await self._call_all("status")

    async def pause(self, mode: PauseMode = "wait") -> list[None | BaseException]:
        """As `AsyncEngine.pause`, for each replica; what one raises stands in its place, here and below."""
        return await self._call_all("pause", mode=mode)

    async def resume(self) -> list[None | BaseException]:
        """As `AsyncEngine.resume`, for each replica."""
        return await self._call_all("resume")

    async def drain(self, timeout: float | None = None) -> list[None | BaseException]:
        """As `AsyncEngine.drain`, for each replica."""
        return await self._call_all("drain", timeout=timeout)

    async def sleep(self, level: int = 1) -> list[None | BaseException]:
        """As `Engine.sleep`, for each replica."""
        return await self._call_all("sleep", level=level)

    async def wake_up(self, parts: Collection[Part] = ("weights", "kv_cache")) -> list[None | BaseException]:
        """As `Engine.wake_up`, for each replica."""
        return await self._call_all("wake_up", parts=tuple(parts))

    async def update_weights(self, path: str | Path) -> list[None | BaseException]:
        """As `Engine.update_weights`, from a directory, for each replica."""
        return await self._call_all("update_weights", path=str(path))

    async def reset_prefix_cache(self) -> list[None | BaseException]:
        """As `Engine.reset_prefix_cache`, for each replica."""
        return await self._call_all("reset_prefix_cache")

    async def explain(self) -> list[list[dict[str, Any]] | BaseException]:
        """For each replica the rows of `LLM.explain`."""
        return await self._call_all("explain")

    async def dump(self) -> list[str | BaseException]:
        """For each replica the state of its engine as text, also while a step hangs."""
        return await self._call_all("dump")

    async def set_log_level(self, level: str) -> list[None | BaseException]:
        """Set that of the logger ``gristmill``, in this process and in each replica: ``debug``, ``info``, ``warning`` or ``error``."""
        set_log_level(level)
        return await self._call_all("set_log_level", level=level)

    async def profile(self, steps: int, path: str | Path) -> list[str | BaseException]:
        """Write a trace of the next `steps` steps of each replica, for chrome://tracing or Perfetto. Returns the files: `path`, and with several
        replicas their numbers before its suffix. UsageError: another profile is being taken."""
        path = Path(path).absolute()
        paths = [path]
        if len(self._replicas) > 1:
            paths = [path.with_stem(f"{path.stem}-{number}") for number in range(len(self._replicas))]
        calls = (
            self._call(replica, "profile", steps=steps, path=str(one))
            for replica, one in zip(self._replicas, paths, strict=True)
        )
        files: list[str | BaseException] = await asyncio.gather(*calls, return_exceptions=True)
        return files

    def close(self) -> None:
        """End the processes; unfinished requests end with ReplicaError."""
        with self._lock:
            for replica in self._replicas:
                replica.error = replica.error or ReplicaError("the replicas were closed")
        for replica in self._replicas:
            replica.child.process.kill()

    @contextmanager
    def _name(self, name: str | None) -> Iterator[None]:
        """Let a request have a name. UsageError: an unfinished one has it."""
        if name is None:
            yield
            return
        with self._lock:
            if name in self._names:
                raise UsageError(f"request id {name!r} is in use by an unfinished request")
            self._names.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._names.discard(name)

    async def _call(self, replica: _Replica, name: str, **arguments: Any) -> Any:
        """The result of a method of `Calls`."""
        async with aclosing(self._items("", "call", name, arguments, on=replica)) as items:
            return [item async for (item,) in items][0]

    async def _call_all(self, name: str, **arguments: Any) -> list[Any]:
        calls = (self._call(replica, name, **arguments) for replica in self._replicas)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _items(
        self,
        prompt: str | list[int],
        kind: str,
        *arguments: Any,
        on: _Replica | None = None,
        full: set[int] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """The answer of a replica to a message: of `on`, or of one that is chosen for the prompt, which is added to `full`, and was not in it."""
        name, answers = f"request-{next(self._numbers)}", asyncio.Queue[Any]()
        full = set() if full is None else full
        with self._lock:
            loads = {n: load for n, load in self._loads().items() if n not in full}
            if on is None and loads:
                chosen = self._router.choose(prompt, loads)
                full.add(chosen)
                on = self._replicas[chosen]
            if on is None:
                errors = "; ".join(str(replica.error) for replica in self._replicas)
                raise ReplicaError(f"no replica is left: {errors}")
            if on.error is not None:
                raise ReplicaError(str(on.error))
            on.calls[name] = asyncio.get_running_loop(), answers
        on.outgoing.put((name, kind, arguments))
        try:
            while (item := await answers.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if on.calls.pop(name, None) is not None:
                on.outgoing.put((name, "abort", ()))

    def _loads(self) -> dict[int, int]:
        return {n: len(replica.calls) for n, replica in enumerate(self._replicas) if replica.error is None}

    def _await_loaded(self, deadline: float) -> None:
        for child in (replica.child for replica in self._replicas):
            if not child.connection.poll(max(0.0, deadline - time.monotonic())):
                raise ReplicaError(f"replica {child.number} did not load the model in time")
            try:
                answer = child.connection.recv()
            except (EOFError, OSError):
                raise ReplicaError(_death(child, "while it loaded the model")) from None
            if isinstance(answer, Failure):
                failed = ReplicaError(f"replica {child.number} failed to load the model\n{answer.text}")
                raise answer.error if isinstance(answer.error, ValueError | RuntimeError) else failed

    def _send(self, replica: _Replica) -> None:
        with suppress(OSError):  # its end is noticed by the receiver
            while (message := replica.outgoing.get()) is not None:
                replica.child.connection.send(message)

    def _receive(self, replica: _Replica) -> None:
        """Hand out answers until the process ends, or stops responding."""
        child, why = replica.child, ""
        try:
            while True:
                if not child.connection.poll(self._timeout / 2):
                    replica.outgoing.put(("", "ping", ()))
                    if not child.connection.poll(self._timeout / 2):
                        why = f"replica {child.number} sent nothing for {self._timeout:g} s and was ended"
                        break
                answer = child.connection.recv()
                if isinstance(answer, Failure):
                    why = f"replica {child.number} failed: {answer.error or answer.text}"
                    break
                name, item = answer
                ends = item is None or isinstance(item, Exception)
                if call := replica.calls.pop(name, None) if ends else replica.calls.get(name):
                    _deliver(call, item)
        except (EOFError, OSError):
            why = _death(child, "with its requests")
        with self._lock:
            replica.error = replica.error or ReplicaError(why)
            calls = list(replica.calls.values())
            replica.calls.clear()
        replica.outgoing.put(None)
        child.end()
        for call in calls:
            _deliver(call, ReplicaError(str(replica.error)))


def _deliver(call: Call, item: object) -> None:
    with suppress(RuntimeError):  # the loop was closed with its callers
        call[0].call_soon_threadsafe(call[1].put_nowait, item)


def device_of(options: Mapping[str, Any]) -> str:
    """The device that the options of `LLM` name for each of several replicas: ``auto`` is decided once for all."""
    device, policy = str(options.get("device", "auto")), options.get("policy")
    if device != "auto":
        return device
    return parse_device(device, Policy.load(policy) if isinstance(policy, str | Path) else policy).type


def _environments(count: int, skip: int, options: Mapping[str, Any]) -> list[dict[str, str]]:
    """What distinguishes the environments of the replicas: the GPUs that they see."""
    if options["device"] != "cuda":
        return [{}] * count
    each, visible = options.get("tensor_parallel", 1), os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    groups = [devices[first : first + each] for first in range(skip, skip + each * count, each)]
    if len(devices) < skip + each * count:
        raise UsageError(
            f"{count} replicas need {each} GPUs each, {len(devices) - skip} are free; device='cpu' has them all on the CPU"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def _share(options: Mapping[str, Any], number: int, count: int) -> dict[str, int]:
    """What a replica has of the caps of the queue, which hold for all replicas together; at least 1, if the cap is not 0."""
    shares = {}
    for name in ("max_queued", "max_queued_tokens"):
        if (most := options.get(name)) is not None:
            shares[name] = most // count + (number < most % count) or min(1, most)
    return shares


def _death(child: ChildProcess, when: str) -> str:
    child.process.kill()
    return f"replica {child.number} died ({status(child.process.wait())}) {when}"
