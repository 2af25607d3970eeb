"""Several copies of a model, each in a process of its own, with one front end: data parallelism without communication.

async with Replicas("DIR", count=2, device="cuda") as replicas:
    async for chunk in replicas.stream("The index", SamplingParams(max_tokens=32)):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.checkpoint import NoTokenizerError
from gristmill.runtime.async_engine import MAX_QUEUED
from gristmill.runtime.async_request import AsyncPrompts
from gristmill.runtime.completion import Chunk, Completion, GrowingChoices
from gristmill.runtime.devices import parse_device
from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.runtime.hub import local_model
from gristmill.runtime.integers import plain
from gristmill.runtime.llm import NO_TEXT, Prompt
from gristmill.runtime.loader.config import open_checkpoint
from gristmill.runtime.metrics import Metrics
from gristmill.runtime.parallel.child_process import ChildProcess, end_all, spawn
from gristmill.runtime.parallel.loading import await_loaded, environments
from gristmill.runtime.parallel.queue_cap import QueueCap
from gristmill.runtime.parallel.rank_processes import LOADING
from gristmill.runtime.parallel.replica_calls import ReplicaCalls
from gristmill.runtime.parallel.replica_front import ReplicaFront
from gristmill.runtime.parallel.restarts import Restarts
from gristmill.runtime.parallel.route import Route, Router
from gristmill.runtime.pooling.async_pooling import AsyncPooling, PoolingMethods
from gristmill.runtime.pooling.engine import PoolingInput
from gristmill.runtime.pooling.open import describe_pooling
from gristmill.runtime.sampling_params import SamplingParams, check_integers
from gristmill.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from torch import Tensor


LOG = logging.getLogger("gristmill")

TRIES = 3
"""How often a request is run that has got nothing: one that ends whatever engine gets it must not go on forever."""


class Replicas(PoolingMethods, ReplicaCalls):
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
        on_progress: called while the model is loaded, in the thread that waits for it, with the number of a replica, and as a `Progress`.

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
        on_progress: Callable[[int, str, int, int], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
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
        self._cap = QueueCap(MAX_QUEUED * count if most is None else most, most_tokens)
        self._metrics, self._tracer = metrics, tracer
        self._on_event, self._on_progress = on_event, on_progress
        self._retry, self._timeout = retry, timeout
        self._router, self._numbers = Router(route), itertools.count()
        self._names: set[str] = set()  # those that callers gave to unfinished requests
        self._prompts = AsyncPrompts(tokenizer_of(model), None)
        described = describe_pooling(open_checkpoint(model), EngineConfig.of(options))
        if described is not None:
            self._pooling = AsyncPooling(described.front, self._pool, None)
        self._restarts, self._closed = Restarts(restarts), threading.Event()
        self._coming = set(range(count)) if restarts else set()  # those that are started again if they die
        self._starting: dict[int, ChildProcess] = {}
        self._message = model, options, count, LOADING * timeout
        self._environments = environments(count, skip, options)
        children: list[ChildProcess] = []
        try:
            children += (self._spawn(number) for number in range(count))
            await_loaded(children, LOADING * timeout, on_progress)
        except BaseException:
            end_all(children)
            raise
        self._replicas += (self._front(child) for child in children)
        for replica in self._replicas:
            replica.start()

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """As `AsyncEngine.stream`, by one of the replicas. ReplicaError names it if it dies, and none can take its place. QueueFull: too
        many requests wait."""
        return self._stream(prompt, params, priority, request_id, None, whole=whole)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> list[Completion]:
        """As `AsyncEngine.generate`. What a replica that dies has computed is computed again by another one, unless `retry` is False."""
        growing = GrowingChoices()
        ids = await self._prompts.encode(prompt)
        stream = self._stream(ids, params, priority, request_id, growing.clear, whole=True)
        return await growing.of(stream, ids)

    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        request_id: str | None,
        again: Callable[[], None] | None,
        *,
        whole: bool,
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of a request; `whole` as of `AsyncEngine.stream`. `again` is called before it is run anew, and takes back what was yielded;
        None = nobody can."""
        if self._pooling is not None:
            raise UsageError(f"the model {NO_TEXT}")
        ids = await self._prompts.encode(prompt)
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        with self._name(request_id):
            for tries_left in reversed(range(TRIES)):
                begun = False
                stream = self._choose(ids).stream(
                    ids, params, priority=priority, request_id=name, whole=whole
                )
                try:
                    async with aclosing(stream):
                        async for chunk in stream:
                            begun = True
                            yield chunk
                    return
                except ReplicaError:
                    lost = begun and again is None
                    if lost or not self._retry or not tries_left or not await self._any_alive():
                        raise
                    if again is not None:
                        again()

    async def _pool(self, inputs: list[PoolingInput]) -> list[Tensor]:
        """The results of sequences by one of the replicas; by another one if it dies. For the caps of the queue they are one request."""
        name = f"pool-{next(self._numbers)}"
        self._cap.enter(name, [name], sum(len(one.ids) for one in inputs))
        try:
            for _ in range(TRIES - 1 if self._retry else 0):
                with suppress(ReplicaError):
                    return await self._choose(inputs[0].ids).pool(inputs)
                await self._any_alive()
            return await self._choose(inputs[0].ids).pool(inputs)
        finally:
            self._cap.leave([name])

    async def save(self, prompt: Prompt, seconds: float) -> bool:
        """Compute a prompt, and wait up to `seconds` for its blocks to be in the stores of `kv_transfer`; whether they are."""
        ids = await self._prompts.encode(prompt)
        replica = self._choose(ids)
        await replica.generate(ids, SamplingParams(max_tokens=1))
        return bool(await replica.call("flush_kv_transfer", seconds=seconds))

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
            await_loaded([child], LOADING * self._timeout, self._on_progress)
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
