"""The scheduler: requests, their queues and blocks; schedule, commit, update.

Two committed steps may be in flight: while one runs, the next one is made from what is known of its results, their number.
`Request.pending` counts these tokens, and only real ids are appended to `Request.tokens`. An end token becomes known when
the next step is in flight: what that one computes for the request is dropped. A request whose length ends it is
scheduled no further. What a request held can be given away when it ends, because its next owner runs after the steps in flight.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from gristmill.runtime.errors import INVALID_LOGITS, UsageError
from gristmill.runtime.kv_cache import PoolError, PoolTransaction, PrefixCache
from gristmill.runtime.kv_cache.groups import first_needed
from gristmill.runtime.scheduler.policy import Admission, admission, queue_key
from gristmill.runtime.scheduler.request import FinishReason, Request, RequestState
from gristmill.runtime.scheduler.state import Pause, SchedulerState
from gristmill.runtime.scheduler.step import Decode, RequestOutput, ScheduledRequest, ScheduledStep
from gristmill.runtime.scheduler.step_builder import StepBuilder

IN_FLIGHT = 2
"""Committed steps that may wait for their results."""


class RequestTooLarge(ValueError):
    """The request can never fit, even when all others have ended."""


class QueueFull(RuntimeError):
    """max_queued requests are already waiting: try again later."""


class SchedulerStuck(RuntimeError):
    """Requests are unfinished, none waits for an external event, and a step would do nothing. Always a bug."""


class Scheduler(SchedulerState):
    """Continuous batching over a paged KV pool. Not thread-safe: one owner calls it."""

    on_preempt: Callable[[Request], None] | None = None
    """Called by `commit` with a request that it preempts, whose blocks still hold `computed` tokens until the step runs: what copies
    them elsewhere is launched before the step. The request and the scheduler must not be changed."""

    # Requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request, held: bool = False) -> None:
        """Queue a request; `held` until `resume`, for one that waits for an external event (a transfer, a grammar).

        Raises RequestTooLarge when it could never run, QueueFull, UsageError for an id in use, and ValueError for a used request.
        """
        if request.state is not RequestState.NEW:
            raise ValueError(f"request {request.id!r} was added before: make a new Request")
        if request.id in self.requests:
            raise UsageError(f"request id {request.id!r} is in use by an unfinished request")
        self._refuse_too_large(request)
        limit = self.config.max_queued
        if limit is not None and len(self.waiting) + len(self.held) >= limit:
            raise QueueFull(
                f"request {request.id!r} refused: {limit} requests are waiting, which is max_queued"
            )
        most = self.config.max_queued_tokens
        if most is not None and self.queued_tokens and self.queued_tokens + request.prompt_len > most:
            raise QueueFull(
                f"request {request.id!r} refused: {self.queued_tokens} prompt tokens are waiting, with its {request.prompt_len} "
                f"more than max_queued_tokens ({most})"
            )
        if self.cache is not None:
            self.cache.extend_hashes(request.block_hashes, request.tokens, request.cache_key)
        request.limit = min(request.limit, self.config.capacity)
        request.arrival = self._arrivals
        self._arrivals += 1
        self.requests[request.id] = request
        self.queued_tokens += request.prompt_len
        self._enqueue(request)
        if held:
            self.hold(request.id)

    def hold(self, request_id: str) -> None:
        """Take a waiting request out of the queue until `resume`. KeyError: no such unfinished request."""
        request = self.requests[request_id]
        self.waiting.remove(request)
        request.state = RequestState.HELD
        self.held[request_id] = request

    def resume(self, request_id: str) -> None:
        """Release a held request: it takes its place in the queue, by arrival."""
        if request_id not in self.held:
            raise ValueError(f"request {request_id!r} is not held; held are {list(self.held)}")
        self._enqueue(self.held.pop(request_id))

    def propose(self, request_id: str, draft_ids: Sequence[int]) -> None:
        """Drafts for the next step of a running request; a step may take fewer, and they are used once."""
        request = self.requests.get(request_id)
        if request is None or self.in_flight:
            why = "no such unfinished request" if request is None else "a step is in flight"
            raise ValueError(f"no drafts can be taken for request {request_id!r}: {why}")
        if request.state is not RequestState.RUNNING or len(request.tokens) - request.computed != 1:
            raise ValueError(
                f"drafts can only follow a request's last token, but {request!r} is not decoding"
            )
        request.drafts, request.steady = list(draft_ids), 0
        self._version += 1

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[RequestOutput]:
        """End requests in any state. Returns the ended ones, without unknown and finished ids."""
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.state is RequestState.RUNNING:
                self.running.remove(request)
            else:
                if self.held.pop(request_id, None) is None:
                    self.waiting.remove(request)
                self.queued_tokens -= request.prompt_len
            self._finish(request, reason)
            ended.append(RequestOutput(request_id, (), reason))
        if ended:
            self._version += 1
        return ended

    def has_unfinished(self) -> bool:
        """Whether any request, held ones included, has not ended."""
        return bool(self.requests)

    def has_started(self) -> bool:
        """Whether a request runs, or was preempted and will run again."""
        return bool(self.running) or any(r.started for r in (*self.waiting, *self.held.values()))

    def pause(self, pause: Pause | None) -> None:
        """From now on schedule only the work that `pause` allows; None: everything. A step that is already scheduled is unchanged."""
        self.paused = pause

    def lend(self, blocks: Sequence[int]) -> None:
        """References to blocks, which the caller has taken in the pool, are nobody's request; requests may have to wait for `give_back`."""
        self.lent.update(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Release references that were lent."""
        for block, count in Counter(blocks).items():
            self.lent[block] -= count
            if self.lent[block] <= 0:
                del self.lent[block]
        self.pool.release(blocks)

    # A step --------------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Make the next step. Changes nothing, so a step can be dropped.

        A step is empty if there is nothing to do, and while a step is in flight also if its results are needed first: to
        preempt a request, or to know which of its drafts were accepted.

        Raises SchedulerStuck if the step would be empty although a request is unfinished, not held and not paused, no step
        is in flight, and no blocks are lent.
        """
        if len(self.in_flight) == IN_FLIGHT:
            raise RuntimeError(f"{IN_FLIGHT} committed steps are in flight: call update or discard first")
        if self.paused is Pause.ALL or any(step.has_drafts for step in self.in_flight):
            return self._builder().run((), ())
        waiting = self.waiting
        if self.paused is Pause.NEW:
            waiting = [request for request in waiting if request.started]
        step = self._builder().run(self.running, waiting)
        if (
            not step.entries and not self.in_flight and not self.lent and (self.running or waiting)
        ):  # held requests have no blocks, so they are no reason for an empty step
            raise SchedulerStuck("an empty step with unfinished requests\n" + self.dump())
        return step

    def commit(self, step: ScheduledStep) -> None:
        """Apply a step: allocations, evictions, preemptions, admissions. The runner may then run it.

        Requests added since it was made do not matter. Raises ValueError, with nothing applied, when anything else
        happened in between.
        """
        if step.version != self._version or step.pool is None:
            raise ValueError("the step is stale: the scheduler has changed since it was made; schedule again")
        self.pool.apply(step.pool.ops)
        for request_id in step.preempted:
            self._preempt(self.requests[request_id])
        if step.preempted:
            self.running = [r for r in self.running if r.state is RequestState.RUNNING]
        for request_id, count in step.bypassed.items():
            self.requests[request_id].bypassed += count
        for request_id, hits in step.admitted.items():
            request = self.requests[request_id]
            self.waiting.remove(request)
            self.running.append(request)
            self.queued_tokens -= request.prompt_len
            request.state = RequestState.RUNNING
            request.started = True
            request.bypassed = 0
            request.row = self.free_rows.pop()
            request.computed = len(hits) * self.config.block_size
            if hits:
                request.registered = len(hits)
                request.last_cached = hits[-1]
                if request.preemptions == 0:
                    request.cached_tokens = request.computed
        requests = self.requests
        for entry in step.entries:
            request = requests[entry.id]
            if type(entry) is Decode:
                request.computed = entry.start + 1
                request.pending += 1
                continue
            entry.block_ids.extend(entry.new_blocks)
            entry.row = request.row
            request.computed = entry.start + entry.count
            request.pending += entry.samples
            request.steady = self._steady(request)
        self.in_flight.append(step)
        self._version += 1

    def update(self, step: ScheduledStep, sampled_ids: Sequence[int | Sequence[int]]) -> list[RequestOutput]:
        """Take the results of the oldest step in flight: one for each entry of `step.sampling()`, in that order.

        A result is a token id; or, after drafts, the accepted drafts followed by the one token sampled after them. A negative id
        ends the request with an error.
        Returns the new tokens and the finish reason of every request that got tokens. Entries of requests that have ended
        meanwhile are skipped. Raises ValueError, with nothing applied, for results that do not fit the step.
        """
        if not self.in_flight or step is not self.in_flight[0]:
            raise ValueError("update takes the results of the oldest step in flight")
        self._check_results(step, sampled_ids)
        outputs = []
        finished = False
        size, windowed = self.config.block_size, len(self.config.windows) > 1
        requests = self.requests
        results = iter(sampled_ids)
        for entry in step.entries:
            result = next(results) if entry.samples else ()
            request = requests.get(entry.id)
            if request is None or request.block_ids is not entry.block_ids:
                continue  # it has ended
            computed = entry.start + entry.count  # by this step; a later one may be in flight
            if (
                type(entry) is Decode
                and type(result) is int
                and result >= 0
                and result not in request.stop_ids
                and len(request.tokens) + 1 < request.limit
                and not request.drafts
            ):  # what most entries of a large batch are: a token that ends nothing. As below, without calls.
                request.pending -= 1
                request.tokens.append(result)
                outputs.append(RequestOutput(entry.id, [result], None, (), None, None, request.cached_tokens))
            elif entry.samples:
                request.pending -= 1
                new_ids = [result] if isinstance(result, int) else result
                output = self._append(request, new_ids)
                outputs.append(output)
                if entry.drafts:
                    computed -= entry.drafts - (len(new_ids) - 1)
                    request.computed = computed
                if request.drafts:
                    request.drafts = []  # used once, even those that did not fit
                    request.steady = self._steady(request)
                if output.finish_reason is not None:
                    # Positions after the end belong to no known token; what a failed row computed is not shared.
                    failed = output.finish_reason is FinishReason.ERROR
                    computed = 0 if failed else min(computed, len(request.tokens) - 1)
            if computed >= (request.registered + 1) * size and self.cache is not None:
                self._register(self.cache, request, computed)
            if windowed and request.finish_reason is None:
                self._release_behind(request, computed)
            if request.finish_reason is not None:
                finished = True
                self._finish(request, request.finish_reason)
        if finished:
            self.running = [r for r in self.running if r.state is RequestState.RUNNING]
        del self.in_flight[0]
        self._version += 1
        return outputs

    def discard(self, step: ScheduledStep) -> None:
        """Drop a step in flight, which could not be run, and those committed after it. Their requests will be scheduled again from
        what the results before have left."""
        if not any(step is one for one in self.in_flight):
            raise ValueError("only a step in flight can be discarded")
        last = None
        while last is not step:
            last = self.in_flight.pop()
            for entry in last.entries:
                if (request := self.current(entry)) is not None:
                    request.computed = entry.start
                    request.pending -= entry.samples
                    request.steady = self._steady(request)
        self._version += 1

    def serves(self, step: ScheduledStep) -> bool:
        """Whether any request of a committed step has not ended: whether its results matter."""
        return any(self.current(entry) is not None for entry in step.entries)

    def current(self, entry: ScheduledRequest) -> Request | None:
        """The request of an entry of a committed step; None if it has ended: another request with its id is not, nor itself after a preemption."""
        request = self.requests.get(entry.id)
        return request if request is not None and request.block_ids is entry.block_ids else None

    # Mechanism -----------------------------------------------------------------------------------------------------

    def _builder(self) -> StepBuilder:
        return StepBuilder(
            self.config, PoolTransaction(self.pool), self.cache, self._version, bool(self.in_flight)
        )

    def _refuse_too_large(self, request: Request) -> None:
        config = self.config
        need = request.prompt_len + 1
        blocks = config.most_held(need)
        fits = admission(blocks, config.num_blocks, config.num_blocks)
        if fits is Admission.NEVER or need > config.capacity:
            limit = "unlimited" if config.max_model_len is None else f"{config.max_model_len} tokens"
            raise RequestTooLarge(
                f"request {request.id!r} can never run: {request.prompt_len} prompt tokens and at least one more need "
                f"{need} tokens in {blocks} blocks of {config.block_size}; the capacity is {config.num_blocks} blocks "
                f"({config.num_blocks * config.block_size} tokens) and max_model_len is {limit}"
            )

    def _enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        insort(self.waiting, request, key=lambda r: queue_key(self.config, r))

    def _preempt(self, request: Request) -> None:
        """Return the request to the queue with nothing computed; the step's pool operations release its blocks."""
        if request.pending:
            raise PoolError(f"preempted with a token in flight: {request!r}\n{self.dump()}")
        if self.on_preempt is not None:
            self.on_preempt(request)
        request.preemptions += 1
        self.queued_tokens += request.prompt_len
        self._forget_blocks(request)
        request.computed = 0
        self._enqueue(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.pool.release(request.block_ids)
        self._forget_blocks(request)
        request.computed -= request.pending
        request.pending = 0
        request.finish_reason = reason
        request.state = RequestState.FINISHED
        del self.requests[request.id]

    def _forget_blocks(self, request: Request) -> None:
        request.block_ids = []  # a new list: a step may still hold the old one
        request.drafts = []
        if request.row >= 0:
            self.free_rows.append(request.row)
            request.row = -1
        request.registered = request.steady = 0
        request.last_cached = request.refusal = None

    def _check_results(self, step: ScheduledStep, sampled_ids: Sequence[int | Sequence[int]]) -> None:
        entries = step.sampling()
        if len(sampled_ids) != len(entries):
            raise ValueError(f"the step samples for {len(entries)} requests, got {len(sampled_ids)} results")
        if set(map(type, sampled_ids)) <= {int} and not step.has_drafts:
            return
        for entry, result in zip(entries, sampled_ids, strict=True):
            if isinstance(result, (list, tuple)):
                self._check_accepted(entry, result)
            elif not isinstance(result, int):
                raise TypeError(
                    f"request {entry.id!r}: a token id (int) or a list of them expected, got {type(result).__name__}"
                )

    def _check_accepted(self, entry: ScheduledRequest, result: Sequence[int]) -> None:
        if not 1 <= len(result) <= entry.drafts + 1:
            raise ValueError(
                f"request {entry.id!r}: 1 to {entry.drafts + 1} tokens expected for {entry.drafts} drafts, "
                f"got {len(result)}"
            )
        drafts = entry.draft_tokens
        if list(result[:-1]) != drafts[: len(result) - 1]:
            raise ValueError(
                f"request {entry.id!r}: accepted tokens {list(result[:-1])} are not the drafts {drafts}"
            )

    def _append(self, request: Request, new_ids: Sequence[int]) -> RequestOutput:
        """Append tokens until one of them ends the request; the rest of an accepted run is dropped."""
        tokens = request.tokens
        accepted = 0
        for token in new_ids:
            if token < 0:
                request.finish_reason = FinishReason.ERROR
                break
            tokens.append(token)
            accepted += 1
            if token in request.stop_ids:
                request.finish_reason = FinishReason.STOP
                break
            if len(tokens) >= request.limit:
                request.finish_reason = FinishReason.LENGTH
                break
        if accepted < len(new_ids):
            new_ids = new_ids[:accepted]
        output = RequestOutput(
            request.id, new_ids, request.finish_reason, cached_tokens=request.cached_tokens
        )
        if request.finish_reason is FinishReason.ERROR:
            output.error = INVALID_LOGITS
        return output

    def _release_behind(self, request: Request, computed: int) -> None:
        """Give back blocks outside the windows of all later queries. With results only: a step in flight may be discarded."""
        blocks, groups = request.block_ids, len(self.config.windows)
        for group, window in enumerate(self.config.windows):
            end = first_needed(window, computed, self.config.block_size) * groups + group
            start = end
            while start >= groups and blocks[start - groups] != self.pool.num_blocks:
                start -= groups
            if start < end:
                self.pool.release(blocks[start:end:groups])
                blocks[start:end:groups] = [self.pool.num_blocks] * ((end - start) // groups)

    def _register(self, cache: PrefixCache, request: Request, computed: int) -> None:
        """Register blocks that the first `computed` tokens fill in the prefix cache."""
        size, groups = self.config.block_size, len(self.config.windows)
        cache.extend_hashes(request.block_hashes, request.tokens, request.cache_key)
        for index in range(request.registered, computed // size):
            request.last_cached = cache.insert(
                request.block_hashes[index],
                request.tokens[index * size : (index + 1) * size],
                request.cache_key,
                request.last_cached,
                *request.block_ids[index * groups : (index + 1) * groups],
            )
            request.registered = index + 1
