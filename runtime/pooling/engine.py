"""The engine for pooling: whole sequences in batches by tokens, without a cache. Any thread may add requests and compute batches."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from gristmill.runtime.engine import EngineDraining, PauseMode
from gristmill.runtime.errors import UsageError
from gristmill.runtime.explain import explain_plans
from gristmill.runtime.models import Encoder
from gristmill.runtime.ownership import Ownership
from gristmill.runtime.parallel.rank_processes import RemoteModel
from gristmill.runtime.pooling.pooler import Head
from gristmill.runtime.sampling_params import check_timeout
from gristmill.runtime.scheduler import QueueFull, RequestTooLarge
from gristmill.runtime.sequences import Sequences
from gristmill.runtime.status import EngineStatus, State

WINDOW = 1024
"""The oldest requests, among which a batch is chosen."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """A sequence.

    Attributes:
        ids: at least one.
        types: token types; None = all 0.
        skip: first ids that belong to a prompt.
        seen: first ids that others attend to; None = all.
    """

    ids: Sequence[int]
    types: Sequence[int] | None = None
    skip: int = 0
    seen: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequest:
    """A sequence that waits, and its result: float32 [columns], or [tokens, columns], on the host."""

    input: PoolingInput
    result: Future[Tensor] = field(default_factory=Future)


class PoolingQueue:
    """Sequences that wait, and the choice of batches; what computes them, here or elsewhere, is a subclass. A batch begins with the request
    that has waited longest; those of the nearest lengths join it.

    Args:
        model: its sizes are part of the status.
        max_batch_tokens: tokens of a batch. A longer sequence is a batch of its own.
        max_seqs: sequences of a batch.
        max_length: tokens of the longest sequence.
        max_queued, max_queued_tokens: waiting requests, and their tokens, beyond which others are refused; None = no limit.
    """

    def __init__(
        self,
        model: Encoder | RemoteModel,
        *,
        max_batch_tokens: int,
        max_seqs: int,
        max_length: int,
        max_queued: int | None = None,
        max_queued_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.max_batch_tokens, self.max_seqs, self.max_length = max_batch_tokens, max_seqs, max_length
        self.max_queued, self.max_queued_tokens = max_queued, max_queued_tokens
        self.ownership = Ownership()
        self._waiting: list[PoolingRequest] = []
        self._computing: list[PoolingRequest] = []
        self._tokens = 0
        self._lock = threading.Lock()  # of what waits
        self._running = threading.Lock()  # one batch at a time
        self._paused = self._draining = False
        self._abort_at = math.inf

    @property
    def waiting(self) -> int:
        """Requests that are in no batch yet."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """Whether `pause` was called: a step does nothing."""
        return self._paused

    @property
    def draining(self) -> bool:
        """Whether `drain` was called: `add` refuses."""
        return self._draining

    def has_unfinished(self) -> bool:
        """Whether any request has no result."""
        return bool(self._waiting or self._computing)

    def pause(self, mode: PauseMode = "wait") -> None:
        """Compute no further batch, until `resume`; requests may be added meanwhile. With the mode ``abort``, those that wait end with a
        CancelledError."""
        if mode not in get_args(PauseMode):
            raise UsageError(f"unknown mode {mode!r}, expected one of {', '.join(get_args(PauseMode))}")
        self._paused = True
        if mode == "abort":
            self.abort()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    def drain(self, timeout: float | None = None) -> None:
        """Take no more requests; those that wait are computed. It cannot be undone.

        Args:
            timeout: seconds after which the next step ends those that still wait with a CancelledError; None = no limit.
        """
        check_timeout(timeout)
        self._abort_at = math.inf if timeout is None else time.monotonic() + timeout
        self._draining, self._paused = True, False

    def abort(self) -> None:
        """End what waits: its results are cancelled."""
        with self._lock:
            dropped, self._waiting, self._tokens = self._waiting, [], 0
        for request in dropped:
            request.result.cancel()
            request.result.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """End everything with an error, also a batch that another thread computes: nobody waits for that any more."""
        with self._lock:
            dropped = [*self._computing, *self._waiting]
            self._waiting, self._tokens = [], 0
        for request in dropped:
            with suppress(InvalidStateError):
                request.result.set_exception(error)

    def status(self) -> EngineStatus:
        """Limits and load, as values: there is no cache."""
        plans = self.model.plans
        state: State = "draining" if self._draining else "paused" if self._paused else "running"
        return EngineStatus(
            state=state,
            running=len(self._computing),
            waiting=len(self._waiting),
            waiting_tokens=self._tokens,
            num_blocks=0,
            block_size=0,
            used_blocks=0,
            cached_blocks=0,
            max_request_tokens=self.max_length,
            max_seqs=self.max_seqs,
            max_batch_tokens=self.max_batch_tokens,
            weight_bytes=plans.weight_bytes,
            cache_bytes=0,
            late_kernels=plans.late,
        )

    def dump(self) -> str:
        """The state as text."""
        draining = ", draining" if self._draining else ""
        return f"{len(self._computing)} sequences in a batch, {len(self._waiting)} waiting ({self._tokens} tokens){draining}"

    def add(self, inputs: Sequence[PoolingInput]) -> list[Future[Tensor]]:
        """Let sequences wait, all of them or none, and return their results, which come by `step`.

        Raises:
            QueueFull: too many wait.
            RequestTooLarge: a sequence is longer than max_length.
            EngineDraining: `drain` was called.
        """
        if self._draining:
            raise EngineDraining("the engine is draining: it takes no new requests")
        longest = max((len(each.ids) for each in inputs), default=0)
        if longest > self.max_length:
            raise RequestTooLarge(f"a sequence of {longest} tokens, and the model takes {self.max_length}")
        requests, tokens = [PoolingRequest(each) for each in inputs], sum(len(each.ids) for each in inputs)
        with self._lock:
            self._drop_cancelled()
            for count, most, what in (
                (len(self._waiting) + len(requests), self.max_queued, "requests, more than max_queued"),
                (self._tokens + tokens, self.max_queued_tokens, "tokens, more than max_queued_tokens"),
            ):
                if most is not None and count > most:
                    raise QueueFull(
                        f"{len(requests)} requests refused: with them {count} {what} = {most} would wait"
                    )
            self._waiting += requests
            self._tokens += tokens
        return [request.result for request in requests]

    def run(self, inputs: Sequence[PoolingInput]) -> list[Tensor]:
        """The results of sequences, float32 [columns] each. The calling thread computes batches until they are there, also those of others.

        Raises:
            QueueFull, RequestTooLarge, EngineDraining: as `add`. What the batch of a sequence failed with.
            UsageError: the engine is paused, or an AsyncEngine serves it.
        """
        self.ownership.check()
        results = self.add(inputs)
        try:
            for result in results:
                while not result.done():
                    if self._paused:
                        raise UsageError("the engine is paused: call resume first")
                    self.step()
        finally:
            for result in results:
                result.cancel()
        return [result.result() for result in results]

    def step(self) -> list[PoolingRequest]:
        """Compute one batch, if something waits; returns its requests. What fails is the result of its requests.

        Another thread's batch is waited for.
        """
        with self._running:
            if self._abort_at <= time.monotonic():
                self.abort()
            batch = [] if self._paused else self._take()
            try:
                rows = self.compute([request.input for request in batch]) if batch else []
            except BaseException as error:
                for request in batch:
                    self._settle(request, error)
                if not isinstance(error, Exception):
                    raise
            else:
                for request, row in zip(batch, rows, strict=True):
                    self._settle(request, row)
            finally:
                self._computing = []
            return batch

    def _settle(self, request: PoolingRequest, result: Tensor | BaseException) -> None:
        with suppress(InvalidStateError):  # `fail` was faster
            if isinstance(result, BaseException):
                request.result.set_exception(result)
            else:
                request.result.set_result(result)

    def _take(self) -> list[PoolingRequest]:
        """The requests of the next batch, whose results can no longer be cancelled."""
        with self._lock:
            self._drop_cancelled()
            oldest = self._waiting[:WINDOW]
            if not oldest:
                return []
            first = len(oldest[0].input.ids)
            # Sorting is stable: of equal lengths, older ones first.
            order = sorted(oldest, key=lambda request: abs(len(request.input.ids) - first))
            chosen, tokens = list[PoolingRequest](), 0
            for request in order:
                tokens += len(request.input.ids)
                if chosen and (tokens > self.max_batch_tokens or len(chosen) == self.max_seqs):
                    break
                chosen.append(request)
            taken = set(map(id, chosen))
            self._waiting = [request for request in self._waiting if id(request) not in taken]
            self._tokens -= sum(len(request.input.ids) for request in chosen)
            self._computing = [request for request in chosen if request.result.set_running_or_notify_cancel()]
            return self._computing

    def _drop_cancelled(self) -> None:
        """Forget the requests whose callers have left. The lock is held."""
        kept = list[PoolingRequest]()
        for request in self._waiting:
            if request.result.cancelled():
                request.result.set_running_or_notify_cancel()
                self._tokens -= len(request.input.ids)
            else:
                kept.append(request)
        self._waiting = kept

    def compute(self, inputs: Sequence[PoolingInput]) -> Sequence[Tensor]:
        """float32 [columns] of each sequence, or [tokens, columns], on the host."""
        raise NotImplementedError

    def explain(self) -> list[dict[str, Any]]:
        """The rows of `LLM.explain`."""
        raise NotImplementedError

    def close(self) -> None:
        """End what computes elsewhere."""


class PoolingEngine(PoolingQueue):
    """An engine with the model in this process.

    Args:
        head: what is computed from the hidden states.
        limits: the other arguments of `PoolingQueue`.
    """

    model: Encoder

    def __init__(self, model: Encoder, head: Head, **limits: Any) -> None:
        super().__init__(model, **limits)
        self.head = head

    @torch.inference_mode()
    def compute(self, inputs: Sequence[PoolingInput]) -> Sequence[Tensor]:
        """As of `PoolingQueue`."""
        batch = Sequences.of(
            [each.ids for each in inputs],
            self.model.plans.device,
            [each.types for each in inputs],
            [each.seen for each in inputs],
        )
        rows = self.head(self.model.encode(batch), batch, [each.skip for each in inputs]).cpu()
        return rows.split(batch.lengths) if self.head.by_token else rows.unbind(0)

    def explain(self) -> list[dict[str, Any]]:
        """As of `PoolingQueue`."""
        return explain_plans(self.model.plans)
