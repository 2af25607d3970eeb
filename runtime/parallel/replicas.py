"""Several copies of a model, each in a process of its own, with one front end: data parallelism without communication.

async with Replicas("DIR", count=2, device="cuda") as replicas:
    async for chunk in replicas.stream("The index", SamplingParams(max_tokens=32)):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.checkpoint import NoTokenizerError
from gristmill.runtime.async_engine import MAX_QUEUED
from gristmill.runtime.async_request import AsyncPrompts
from gristmill.runtime.completion import Chunk, Completion, GrowingCompletion
from gristmill.runtime.devices import parse_device
from gristmill.runtime.engine import PauseMode
from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.runtime.hub import local_model
from gristmill.runtime.integers import plain
from gristmill.runtime.llm import Prompt
from gristmill.runtime.metrics import Metrics
from gristmill.runtime.parallel.calls import set_log_level
from gristmill.runtime.parallel.child_process import ChildProcess, Failure, end_all, spawn
from gristmill.runtime.parallel.driver import LOADING
from gristmill.runtime.parallel.queue_cap import QueueCap
from gristmill.runtime.parallel.replica_front import ReplicaFront, death
from gristmill.runtime.parallel.restarts import Restarts
from gristmill.runtime.parallel.route import Route, Router
from gristmill.runtime.residency import Part
from gristmill.runtime.sampling_params import SamplingParams, check_integers
from gristmill.runtime.status import EngineStatus
from gristmill.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


LOG = logging.getLogger("gristmill")

TRIES = 3
"""How often a request is run that has got nothing: one that ends whatever engine gets it must not go on forever."""


class Replicas:
    """Copies of a model with one front end. Each decides for itself; they share nothing but, if asked for, a store of `kv_transfer`.

    Args:
        model, options: arguments of `LLM`, for each; a model of the hub is fetched once. On GPUs, replica r has those from r * tensor_parallel
            on. max_queued and max_queued_tokens are those of all replicas together.
        count: number of replicas.
        route: ``prefix``: a request goes to the replica that was sent the longest prefix of its prompt, unless that has far more to do than
            others; ``round_robin``: in turn.
        retry: requests of a replica that dies are run again on another one, where their caller has got nothing yet. False = they end with
            ReplicaError.
        timeout: seconds without a message, and a tenth of the seconds for loading, after which a replica counts as dead.
        skip: GPUs that are left to others, the first ones.
        metrics, tracer: as of `AsyncEngine`, for all replicas together.
        restarts: how many times within 10 minutes a replica that died is started again, after 0.5 s and twice as long each time. Requests whose
            callers have got nothing wait for it, if no other one lives.
        on_event: called in a thread with ``replica_died``, ``replica_restarted`` or ``replica_given_up``, and by name its number (``replica``),
            how many are ``alive``, whether any is still to be ``restarted``, and the ``error``.

    Raises:
        UsageError: as `LLM`; too few GPUs. ReplicaError: a replica died, or did not load the model in time.
    """

    _module = "gristmill.runtime.parallel.replica"

    def __init__(
        self,
        model: str | Path,
        count: int,
        *,
        route: Route = "prefix",
        retry: bool = True,
        timeout: float = 60.0,
        skip: int = 0,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        restarts: int = 0,
        on_event: Callable[..., None] | None = None,
        **options: Any,
    ) -> None:
        count, skip = plain(count), plain(skip)
        check_integers(count=count)
        if type(restarts) is not int or restarts < 0:
            raise UsageError(f"restarts must be an integer of at least 0, got {restarts!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e6:
            raise UsageError(f"timeout must be seconds, more than 0, got {timeout!r}")
        EngineConfig.of(options)  # before processes are started
        model = local_model(model)  # fetched once, not by each of them
        options["device"] = device_of(options)
        most, most_tokens = options.pop("max_queued", None), options.pop("max_queued_tokens", None)
        self._kept: dict[str, dict[str, Any]] = {}  # calls that replicas which are started again get too
        self._cap = QueueCap(MAX_QUEUED * count if most is None else most, most_tokens)
        self._metrics, self._tracer, self._on_event = metrics, tracer, on_event
        self._retry, self._timeout = retry, timeout
        self._router, self._lock, self._numbers = Router(route), threading.Lock(), itertools.count()
        self._names: set[str] = set()  # those that callers gave to unfinished requests
        self._prompts = AsyncPrompts(tokenizer_of(model), None)
        self._restarts, self._closed = Restarts(restarts), threading.Event()
        self._coming = set(range(count)) if restarts else set()  # those that are started again if they die
        self._starting: dict[int, ChildProcess] = {}
        self._message = model, options, count, LOADING * timeout
        self._environments = _environments(count, skip, options)
        children: list[ChildProcess] = []
        try:
            children += (self._spawn(number) for number in range(count))
            deadline = time.monotonic() + LOADING * timeout
            for child in children:
                _await_loaded(child, deadline)
        except BaseException:
            end_all(children)
            raise
        self._replicas = [self._front(child) for child in children]
        for replica in self._replicas:
            replica.start()

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
        """As `AsyncEngine.stream`, by one of the replicas. ReplicaError names it if it dies, and none can take its place. QueueFull: too
        many requests wait."""
        ids = await self._prompts.encode(prompt)
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        with self._name(request_id):
            for tries_left in reversed(range(TRIES)):
                begun = False
                stream = self._choose(ids).stream(ids, params, priority=priority, request_id=name)
                try:
                    async with aclosing(stream):
                        async for chunk in stream:
                            begun = True
                            yield chunk
                    return
                except ReplicaError:
                    if begun or not self._retry or not tries_left or not await self._any_alive():
                        raise

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> list[Completion]:
        """As `AsyncEngine.generate`. What a replica that dies has computed is computed again by another one, unless `retry` is False."""
        given = await self._prompts.encode(prompt)
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        with self._name(request_id):
            for tries_left in reversed(range(TRIES)):
                growing = defaultdict[int, GrowingCompletion](GrowingCompletion)
                stream = self._choose(given).stream(given, params, priority=priority, request_id=name)
                try:
                    async with aclosing(stream):
                        async for chunk in stream:
                            growing[chunk.choice].add(chunk)
                    return [growing[choice].completion(given) for choice in sorted(growing)]
                except ReplicaError:
                    if not self._retry or not tries_left or not await self._any_alive():
                        raise
        raise RuntimeError("the last try returns or raises")

    async def save(self, prompt: Prompt, seconds: float) -> bool:
        """Compute a prompt, and wait up to `seconds` for its blocks to be in the stores of `kv_transfer`; whether they are."""
        ids = await self._prompts.encode(prompt)
        replica = self._choose(ids)
        await replica.generate(ids, SamplingParams(max_tokens=1))
        return bool(await replica.call("flush_kv_transfer", seconds=seconds))

    async def status(self) -> list[EngineStatus | BaseException]:
        """For each replica its status, or the ReplicaError that says why it serves no more."""
        return await self._call_all("status")

    async def pause(self, mode: PauseMode = "wait") -> list[None | BaseException]:
        """As `AsyncEngine.pause`, for each replica; what one raises stands in its place, here and below."""
        return await self._keep("pause", mode=mode)

    async def resume(self) -> list[None | BaseException]:
        """As `AsyncEngine.resume`, for each replica."""
        self._forget("pause")
        return await self._call_all("resume")

    async def drain(self, timeout: float | None = None) -> list[None | BaseException]:
        """As `AsyncEngine.drain`, for each replica."""
        return await self._keep("drain", timeout=timeout)

    async def sleep(self, level: int = 1) -> list[None | BaseException]:
        """As `Engine.sleep`, for each replica."""
        return await self._keep("sleep", level=level)

    async def wake_up(self, parts: Collection[Part] = ("weights", "kv_cache")) -> list[None | BaseException]:
        """As `Engine.wake_up`, for each replica."""
        self._forget("sleep")
        return await self._call_all("wake_up", parts=tuple(parts))

    async def update_weights(self, path: str | Path) -> list[None | BaseException]:
        """As `Engine.update_weights`, from a directory, for each replica."""
        return await self._keep("update_weights", path=str(path))

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
        return await self._keep("set_log_level", level=level)

    async def profile(self, steps: int, path: str | Path) -> list[str | BaseException]:
        """Write a trace of the next `steps` steps of each replica, for chrome://tracing or Perfetto. Returns the files: `path`, and with several
        replicas their numbers before its suffix. UsageError: another profile is being taken."""
        path = Path(path).absolute()
        paths = [path]
        if len(self._replicas) > 1:
            paths = [path.with_stem(f"{path.stem}-{number}") for number in range(len(self._replicas))]
        calls = (
            replica.call("profile", steps=steps, path=str(one))
            for replica, one in zip(self._replicas, paths, strict=True)
        )
        files: list[str | BaseException] = await asyncio.gather(*calls, return_exceptions=True)
        return files

    def close(self) -> None:
        """End the processes; unfinished requests end with ReplicaError."""
        self._closed.set()
        with self._lock:
            starting, replicas = list(self._starting.values()), list(self._replicas)
        for child in starting:
            child.process.kill()
        for replica in replicas:
            replica.end(ReplicaError("the replicas were closed"))

    def _spawn(self, number: int) -> ChildProcess:
        child = spawn(self._module, number, env=self._environments[number])
        child.connection.send(self._message)
        return child

    def _front(self, child: ChildProcess) -> ReplicaFront:
        return ReplicaFront(
            child, self._prompts, self._cap, self._timeout, self._ended, self._metrics, self._tracer
        )

    def _ended(self, replica: ReplicaFront) -> None:
        """Say that a replica has died, and start it again. Called in its thread."""
        number, error = replica.child.number, str(replica.error)
        while not self._closed.is_set():
            seconds = self._restarts.died(number, time.monotonic())
            if seconds is None:
                self._coming.discard(number)
                self._tell("replica_given_up", number, error)
                return
            self._tell("replica_died", number, error)
            if self._closed.wait(seconds):
                return
            try:
                self._start_again(number)
                return
            except Exception as failure:  # whatever loading raises: it is told above
                error = f"replica {number} could not be started again: {type(failure).__name__}: {failure}"

    def _start_again(self, number: int) -> None:
        child = self._spawn(number)
        with self._lock:
            self._starting[number] = child
        try:
            if self._closed.is_set():
                raise ReplicaError("the replicas were closed")
            _await_loaded(child, time.monotonic() + LOADING * self._timeout)
        except BaseException:
            child.end()
            raise
        finally:
            with self._lock:
                del self._starting[number]
        replica = self._front(child)
        replica.start()
        with self._lock:
            kept = list(self._kept.items())
        try:
            for name, arguments in kept:  # before it gets requests: it is as the others are
                replica.ask(name, **arguments).result(LOADING * self._timeout)
        except Exception as failure:
            replica.end(ReplicaError(f"replica {number} was ended: {name} failed: {failure}"))
            return  # its end starts it again
        with self._lock:
            self._replicas[number] = replica
        if self._closed.is_set():
            replica.end(ReplicaError("the replicas were closed"))
        self._tell("replica_restarted", number, None)

    def _tell(self, event: str, number: int, error: str | None) -> None:
        LOG.log(
            logging.WARNING if error is None else logging.ERROR,
            error or f"replica {number} was started again",
        )
        if self._on_event is None:
            return
        try:
            self._on_event(
                event, replica=number, alive=len(self._loads()), restarted=bool(self._coming), error=error
            )
        except Exception:  # the caller's; the replicas go on
            LOG.exception("on_event failed")

    async def _any_alive(self) -> bool:
        """Whether there is a replica for another try; waits for those that are being started."""
        while not self._loads():
            if not self._coming or self._closed.is_set():
                return False
            await asyncio.sleep(0.05)
        return True

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

    async def _keep(self, name: str, **arguments: Any) -> list[Any]:
        """Call all; a replica that is started again is called likewise, in the order of the calls."""
        answers = await self._call_all(name, **arguments)
        if not all(isinstance(answer, BaseException) for answer in answers):  # which nobody has done
            with self._lock:
                self._kept.pop(name, None)
                self._kept[name] = arguments
        return answers

    def _forget(self, name: str) -> None:
        with self._lock:
            self._kept.pop(name, None)

    async def _call_all(self, name: str, **arguments: Any) -> list[Any]:
        calls = (replica.call(name, **arguments) for replica in self._replicas)
        return await asyncio.gather(*calls, return_exceptions=True)

    def _choose(self, prompt: Sequence[int]) -> ReplicaFront:
        """The replica for a prompt."""
        with self._lock:
            if loads := self._loads():
                return self._replicas[self._router.choose(prompt, loads)]
        errors = "; ".join(str(replica.error) for replica in self._replicas)
        raise ReplicaError(f"no replica is left: {errors}")

    def _loads(self) -> dict[int, int]:
        return {
            number: replica.unfinished
            for number, replica in enumerate(self._replicas)
            if replica.error is None
        }


def _await_loaded(child: ChildProcess, deadline: float) -> None:
    if not child.connection.poll(max(0.0, deadline - time.monotonic())):
        raise ReplicaError(f"replica {child.number} did not load the model in time")
    try:
        answer = child.connection.recv()
    except (EOFError, OSError):
        raise ReplicaError(death(child, "while it loaded the model")) from None
    if isinstance(answer, Failure):
        failed = ReplicaError(f"replica {child.number} failed to load the model\n{answer.text}")
        raise answer.error if isinstance(answer.error, ValueError | RuntimeError) else failed


def tokenizer_of(model: str | Path) -> Callable[[], Tokenizer]:
    """What returns the tokenizer of a model, or raises NoTokenizerError. It is read now."""
    try:
        found = Tokenizer(model)
    except NoTokenizerError as error:
        missing = error

        def refuse() -> Tokenizer:
            raise missing

        return refuse
    return lambda: found


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
