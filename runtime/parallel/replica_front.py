"""The front end's half of a replica: its requests, and what is sent to its process and comes from it."""

from __future__ import annotations

import asyncio
import itertools
import math
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from gristmill.runtime.async_request import ActiveRequest, ActiveRequests, AsyncPrompts
from gristmill.runtime.engine_load import EngineLoad
from gristmill.runtime.engine_thread import LOG
from gristmill.runtime.errors import ReplicaError
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.metrics import Metrics
from gristmill.runtime.parallel.child_process import ChildProcess, Failure, status
from gristmill.runtime.parallel.engine_host import unpack
from gristmill.runtime.parallel.queue_cap import QueueCap
from gristmill.runtime.pooling.engine import PoolingInput
from gristmill.runtime.request_front import RequestFront
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.structured_output import StructuredOutput

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from torch import Tensor


class ReplicaFront(RequestFront):
    """The requests of one process.

    Args:
        child: its process, which has loaded the model.
        cap: what all replicas together let wait.
        timeout: seconds without a message after which the process counts as dead.
        on_end: called in a thread of this replica when the process has ended.

    Attributes:
        error: why it serves no more; None while it does.
    """

    def __init__(
        self,
        child: ChildProcess,
        prompts: AsyncPrompts,
        cap: QueueCap,
        timeout: float,
        on_end: Callable[[ReplicaFront], None],
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(prompts, ActiveRequests(lambda: 0, None), metrics, tracer)
        self.child = child
        self.error: ReplicaError | None = None
        self._cap, self._timeout, self._on_end = cap, timeout, on_end
        self._outgoing: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._lock = threading.Lock()  # of error, and of requests and calls that must not be added after it
        self._calls: dict[int, Future[Any]] = {}
        self._unique = itertools.count()
        self._pooling = 0  # sequences that are computed
        self._handlers: dict[str, Callable[..., None]] = {
            "step": self._on_step,
            "refused": self._on_refused,
            "result": self._on_result,
            "failed": self._on_failed,
            "pong": lambda: None,
        }

    def start(self) -> None:
        """Begin to send and to receive."""
        for work in (self._send, self._hear):
            threading.Thread(target=work, name=f"gristmill-replica-{self.child.number}", daemon=True).start()

    @property
    def unfinished(self) -> int:
        """Completions, or sequences to pool, that have not ended."""
        return len(self._requests) + self._pooling

    async def pool(self, inputs: Sequence[PoolingInput]) -> list[Tensor]:
        """The results of sequences, float32 [columns] each. Being cancelled drops what is in no batch yet.

        Raises:
            ReplicaError: it died. As `PoolingEngine.add`; what a batch failed with.
        """
        key = self._id("pool")
        self._pooling += len(inputs)
        try:
            return [torch.from_numpy(row) for row in await self.call("pool", key=key, inputs=[*inputs])]
        except asyncio.CancelledError:
            with suppress(ReplicaError):
                self.ask("cancel", key=key)
            raise
        finally:
            self._pooling -= len(inputs)

    async def call(self, name: str, **arguments: Any) -> Any:
        """The result of a method of `Calls` in the process.

        Raises:
            ReplicaError: it died.
        """
        return await asyncio.wrap_future(self.ask(name, **arguments))

    def ask(self, name: str, **arguments: Any) -> Future[Any]:
        """As `call`, for any thread."""
        number, future = next(self._unique), Future[Any]()
        with self._lock:
            self._check()
            self._calls[number] = future
        self._outgoing.put(("call", number, name, arguments))
        return future

    def end(self, error: ReplicaError) -> None:
        """The process is of no more use: everything unfinished ends with an error of this text."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            calls, requests = list(self._calls.values()), self._requests.all()
            self._calls.clear()
        for call in calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(ReplicaError(str(error)))
        for request in requests:
            with suppress(RuntimeError):  # its loop was closed
                request.loop.call_soon_threadsafe(request.fail, ReplicaError(str(error)))
        if self._metrics is not None:
            self._metrics.forget(self.child.number)
        self.child.process.kill()

    def _check(self) -> None:
        if self.error is not None:
            raise ReplicaError(str(self.error))

    def _id(self, name: str) -> str:
        # No other request ever has it: what is under way for an earlier one of the same name is not taken for this one's.
        return f"{name}#{next(self._unique)}"

    async def _add(
        self,
        request: ActiveRequest,
        ids: Sequence[int],
        params: Sequence[SamplingParams],
        grammars: Sequence[Grammar | None],
        structured_output: StructuredOutput | None,
        priority: int,
    ) -> None:
        names = list(request.open)
        with self._lock:  # registered before an end, it fails with it; after it, here
            self._check()
        self._cap.enter(request.name, names, len(ids))
        request.added = True
        self._outgoing.put(("add", names, ids, params, structured_output, priority))

    def _abort(self, ids: Sequence[str]) -> None:
        self._outgoing.put(("abort", ids))

    def _leave(self, request: ActiveRequest) -> None:
        self._cap.leave(request.ids)
        super()._leave(request)

    # In threads of its own ---------------------------------------------------------------------------------------------

    def _send(self) -> None:
        with suppress(OSError):  # its end is noticed by the receiver
            while (message := self._outgoing.get()) is not None:
                self.child.connection.send(message)

    def _hear(self) -> None:
        """Take messages until the process ends, or stops responding."""
        connection, number = self.child.connection, self.child.number
        readable, half = (
            select.poll(),
            math.ceil(self._timeout * 500),
        )  # Connection.poll makes a selector each time
        readable.register(connection, select.POLLIN)
        try:
            while True:
                if not readable.poll(half):
                    self._outgoing.put(("ping",))
                    if not readable.poll(half):
                        why = f"replica {number} sent nothing for {self._timeout:g} s and was ended"
                        break
                message = connection.recv()
                if isinstance(message, Failure):
                    why = f"replica {number} failed: {message.error or message.text}"
                    break
                self._handlers[message[0]](*message[1:])
        except (EOFError, OSError):
            why = death(self.child, "with its requests")
        except (
            Exception
        ) as error:  # a message that cannot be read or handled: whoever waits must not wait for ever
            LOG.exception("a message of replica %s", number)
            why = f"replica {number} was ended, as its message could not be handled: {type(error).__name__}: {error}"
        self.end(ReplicaError(why))
        self._outgoing.put(None)
        self.child.end()
        self._on_end(self)

    def _on_step(
        self,
        load: EngineLoad,
        launched: float,
        admitted: Sequence[tuple[str, int]],
        preempted: Sequence[str],
        outputs: Sequence[tuple[Any, ...]],
    ) -> None:
        if self._metrics is not None:
            self._metrics.load(load, self.child.number)
        if admitted:
            self._cap.leave(id_ for id_, _ in admitted)
        for id_, cached in admitted:
            if (request := self._requests.added(id_)) is not None:
                self._scheduled(request, id_, cached, launched)
        for id_ in preempted:
            if (request := self._requests.added(id_)) is not None:
                self._preempted(request, id_)
        if outputs:
            self._deliver([unpack(one) for one in outputs])

    def _on_refused(self, id_: str, error: BaseException) -> None:
        request = self._requests.added(id_)
        if request is not None:
            request.added = False
            with suppress(RuntimeError):  # its loop was closed
                request.loop.call_soon_threadsafe(request.fail, error)

    def _on_result(self, number: int, value: Any) -> None:
        if (call := self._calls.pop(number, None)) is not None and call.set_running_or_notify_cancel():
            call.set_result(value)

    def _on_failed(self, number: int, error: BaseException) -> None:
        if (call := self._calls.pop(number, None)) is not None and call.set_running_or_notify_cancel():
            call.set_exception(error)


def death(child: ChildProcess, when: str) -> str:
    """How a process died, which is reaped."""
    child.process.kill()
    return f"replica {child.number} died ({status(child.process.wait())}) {when}"
