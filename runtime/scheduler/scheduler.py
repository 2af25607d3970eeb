"""The scheduler: requests, their queues and blocks; plan, commit, update."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from enum import Enum

from gristmill.runtime.kv_cache import BlockPool, PoolError, PoolPlan, PrefixCache, blocks_needed
from gristmill.runtime.scheduler.config import SchedulerConfig
from gristmill.runtime.scheduler.plan import RequestOutput, ScheduledRequest, StepPlan
from gristmill.runtime.scheduler.planner import Planner
from gristmill.runtime.scheduler.policy import Admission, admission, queue_key
from gristmill.runtime.scheduler.request import FinishReason, Request, RequestState


class RequestTooLarge(ValueError):
    """The request can never fit, even when all others have ended."""


class QueueFull(RuntimeError):
    """max_queued requests are already waiting: try again later."""


class SchedulerStuck(RuntimeError):
    """Requests are unfinished, none waits for an external event, and a step would do nothing. Always a bug."""


class Pause(Enum):
    """The work that a paused scheduler plans. Requests may be added during a pause; they wait."""

    NEW = "new"  # requests that have been admitted before continue, no other is admitted
    ALL = "all"  # nothing; requests keep their blocks


class Scheduler:
    """Continuous batching over a paged KV pool. Not thread-safe: one owner calls it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.cache = PrefixCache(self.pool) if config.prefix_caching else None
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # always sorted by queue_key
        self.held: dict[str, Request] = {}
        self.queued_tokens = 0  # prompt tokens of waiting and held requests
        self.paused: Pause | None = None
        self.in_flight: StepPlan | None = None  # committed, waiting for results
        self._version = 0
        self._arrivals = 0

    # Requests come and go ------------------------------------------------------------------------------------------

    def add(self, request: Request, held: bool = False) -> None:
        """Queue a request; `held` until `resume`, for one that waits for an external event (a transfer, a grammar).

        Raises RequestTooLarge when it could never run, QueueFull, and ValueError for an id in use or a used request.
        """
        if request.state is not RequestState.NEW:
            raise ValueError(f"request {request.id!r} was added before: make a new Request")
        if request.id in self.requests:
            raise ValueError(f"request id {request.id!r} is in use by an unfinished request")
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
        if held:
            request.state = RequestState.HELD
            self.held[request.id] = request
        else:
            self._enqueue(request)

    def resume(self, request_id: str) -> None:
        """Release a held request: it takes its place in the queue, by arrival."""
        if request_id not in self.held:
            raise ValueError(f"request {request_id!r} is not held; held are {list(self.held)}")
        self._enqueue(self.held.pop(request_id))

    def propose(self, request_id: str, draft_ids: Sequence[int]) -> None:
        """Drafts for the next step of a running request; a step may take fewer, and they are used once."""
        request = self.requests.get(request_id)
        if request is None or self.in_flight is not None:
            why = "no such unfinished request" if request is None else "its step is in flight"
            raise ValueError(f"no drafts can be taken for request {request_id!r}: {why}")
        if request.state is not RequestState.RUNNING or len(request.tokens) - request.computed != 1:
            raise ValueError(
                f"drafts can only follow a request's last token, but {request!r} is not decoding"
            )
        request.drafts = list(draft_ids)
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
            elif request.state is RequestState.HELD:
                del self.held[request_id]
                self.queued_tokens -= request.prompt_len
            else:
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
        return bool(self.running) or any(request.started for request in self.waiting)

    def pause(self, pause: Pause | None) -> None:
        """From now on plan only the work that `pause` allows; None: everything. A step that is already planned is unchanged."""
        self.paused = pause

    # A step --------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Plan the next step. Changes nothing, so a plan can be dropped.

        Raises SchedulerStuck if the step would be empty although a request is unfinished, not held and not paused.
        """
        if self.in_flight is not None:
            raise RuntimeError("a committed plan is in flight: call update or discard first")
        if self.paused is Pause.ALL:
            return self._planner().run((), ())
        waiting = self.waiting
        if self.paused is Pause.NEW:
            waiting = [request for request in waiting if request.started]
        plan = self._planner().run(self.running, waiting)
        if not plan.entries and (
            self.running or waiting
        ):  # held requests have no blocks, so they are no reason for an empty step
            raise SchedulerStuck("an empty step with unfinished requests\n" + self.dump())
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Apply a plan: allocations, evictions, preemptions, admissions. The runner may then run it.

        Requests added since it was made do not matter. Raises ValueError, with nothing applied, when anything else
        happened in between.
        """
        if plan.version != self._version or plan.pool is None:
            raise ValueError("the plan is stale: the scheduler has changed since it was made; plan again")
        self.pool.apply(plan.pool.ops)
        for request_id in plan.preempted:
            self._preempt(self.requests[request_id])
        if plan.preempted:
            self.running = [r for r in self.running if r.state is RequestState.RUNNING]
        for request_id, count in plan.bypassed.items():
            self.requests[request_id].bypassed += count
        for request_id, hits in plan.admitted.items():
            request = self.requests[request_id]
            self.waiting.remove(request)
            self.running.append(request)
            self.queued_tokens -= request.prompt_len
            request.state = RequestState.RUNNING
            request.started = True
            request.bypassed = 0
            request.computed = len(hits) * self.config.block_size
            if hits:
                request.registered = len(hits)
                request.last_cached = hits[-1]
                if request.preemptions == 0:
                    request.cached_tokens = request.computed
        for entry in plan.entries:
            if entry.new_blocks:
                entry.block_ids.extend(entry.new_blocks)
        self.in_flight = plan
        self._version += 1

    def update(self, plan: StepPlan, sampled_ids: Sequence[int | Sequence[int]]) -> list[RequestOutput]:
        """Take the results of the committed plan: one for each entry of `plan.sampling()`, in that order.

        A result is a token id; or, after drafts, the accepted drafts followed by the one token sampled after them.
        Returns the new tokens and the finish reason of every request that got tokens. Entries of requests aborted
        meanwhile are skipped. Raises ValueError, with nothing applied, for results that do not fit the plan.
        """
        if plan is not self.in_flight:
            raise ValueError("update wants the plan that was committed last and not updated yet")
        self._check_results(plan, sampled_ids)
        outputs = []
        finished = False
        size = self.config.block_size
        results = iter(sampled_ids)
        for entry in plan.entries:
            result = next(results) if entry.samples else ()
            request = self.requests.get(entry.id)
            if request is None:
                continue
            request.computed = entry.start + entry.count
            if entry.samples:
                new_ids = [result] if isinstance(result, int) else result
                if entry.drafts:
                    request.computed -= entry.drafts - (len(new_ids) - 1)
                if request.drafts:
                    request.drafts = []  # used once, even those that did not fit
                outputs.append(self._append(request, new_ids))
            if request.computed >= (request.registered + 1) * size and self.cache is not None:
                self._register(self.cache, request)
            if request.finish_reason is not None:
                finished = True
                self._finish(request, request.finish_reason)
        if finished:
            self.running = [r for r in self.running if r.state is RequestState.RUNNING]
        self.in_flight = None
        self._version += 1
        return outputs

    def discard(self, plan: StepPlan) -> None:
        """Drop the committed plan, which could not be run. Its requests will be planned again from their previous state."""
        if plan is not self.in_flight:
            raise ValueError("only the plan in flight can be discarded")
        self.in_flight = None
        self._version += 1

    # Inspection ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PoolError with a dump unless every invariant holds. O(everything): for tests and idle times."""
        self.pool.check()
        if self.cache is not None:
            self.cache.check()
        owners = [0] * self.config.num_blocks
        for request in self.requests.values():
            for block in request.block_ids:
                owners[block] += 1
            if len(request.block_ids) * self.config.block_size < request.computed:
                raise PoolError(f"computed tokens without blocks: {request!r}\n{self.dump()}")
            if request.computed >= len(request.tokens):
                raise PoolError(
                    f"nothing left to compute, so nothing to sample from: {request!r}\n{self.dump()}"
                )
            if request.state is not RequestState.RUNNING and (
                request.block_ids or request.computed or request.drafts
            ):
                raise PoolError(
                    f"blocks, computed tokens or drafts without running: {request!r}\n{self.dump()}"
                )
            cached = request.registered * self.config.block_size
            if cached > request.computed or (request.last_cached is None) != (cached == 0):
                raise PoolError(
                    f"{cached} tokens are registered: more than were computed, or not so: {request!r}"
                )
        if owners != self.pool.refs:
            wrong = [(b, n, r) for b, (n, r) in enumerate(zip(owners, self.pool.refs, strict=True)) if n != r]
            raise PoolError(f"(block, owners, references) that differ: {wrong}\n{self.dump()}")
        queued = sum(r.prompt_len for r in (*self.waiting, *self.held.values()))
        if self.queued_tokens != queued:
            raise PoolError(
                f"{self.queued_tokens} prompt tokens are said to wait, {queued} do\n{self.dump()}"
            )
        if len(self.running) > self.config.max_seqs:
            raise PoolError(f"{len(self.running)} requests run, max_seqs is {self.config.max_seqs}")
        if len(self.running) + len(self.waiting) + len(self.held) != len(self.requests):
            raise PoolError(f"a request is in no queue, or in two\n{self.dump()}")

    def snapshot(self) -> tuple[object, ...]:
        """The whole state as values; equal snapshots mean equal states."""
        return (
            self._version,
            self._arrivals,
            self.queued_tokens,
            self.paused,
            id(self.in_flight),
            tuple(self.pool.refs),
            tuple(self.pool.queue()),
            tuple(id(content) for content in self.pool.content),
            self.pool.num_available,
            self.pool.num_cached,
            None if self.cache is None else tuple(sorted(self.cache.snapshot().items())),
            tuple(r.id for r in self.running),
            tuple(r.id for r in self.waiting),
            tuple(self.held),
            tuple(r.snapshot() for r in self.requests.values()),
        )

    def dump(self) -> str:
        """The state as text, for errors."""
        lines = [
            repr(self.config),
            self.pool.dump(),
            f"paused: {None if self.paused is None else self.paused.value}",
        ]
        for name, requests in (
            ("running", self.running),
            ("waiting", self.waiting),
            ("held", self.held.values()),
        ):
            lines.append(f"{name}: {len(requests)}")
            lines.extend(f"  {request!r}" for request in requests)
        return "\n".join(lines)

    # Mechanism -----------------------------------------------------------------------------------------------------

    def _planner(self) -> Planner:
        return Planner(self.config, PoolPlan(self.pool), self.cache, self._version)

    def _refuse_too_large(self, request: Request) -> None:
        config = self.config
        need = request.prompt_len + 1
        blocks = blocks_needed(need, config.block_size)
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
        """Return the request to the queue with nothing computed; the plan's pool operations release its blocks."""
        request.preemptions += 1
        self.queued_tokens += request.prompt_len
        self._forget_blocks(request)
        request.computed = 0
        self._enqueue(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.pool.release(request.block_ids)
        self._forget_blocks(request)
        request.finish_reason = reason
        request.state = RequestState.FINISHED
        del self.requests[request.id]

    def _forget_blocks(self, request: Request) -> None:
        request.block_ids = []  # a new list: a plan may still hold the old one
        request.drafts = []
        request.registered = 0
        request.last_cached = None

    def _check_results(self, plan: StepPlan, sampled_ids: Sequence[int | Sequence[int]]) -> None:
        entries = plan.sampling()
        if len(sampled_ids) != len(entries):
            raise ValueError(f"the plan samples for {len(entries)} requests, got {len(sampled_ids)} results")
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
        drafts = entry.tokens[entry.count - entry.drafts :]
        if list(result[:-1]) != drafts[: len(result) - 1]:
            raise ValueError(
                f"request {entry.id!r}: accepted tokens {list(result[:-1])} are not the drafts {drafts}"
            )

    def _append(self, request: Request, new_ids: Sequence[int]) -> RequestOutput:
        """Append tokens until one of them ends the request; the rest of an accepted run is dropped."""
        tokens = request.tokens
        accepted = 0
        for token in new_ids:
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
            request.computed = len(tokens) - 1  # positions computed after the end belong to no known token
        return RequestOutput(request.id, new_ids, request.finish_reason)

    def _register(self, cache: PrefixCache, request: Request) -> None:
        """Register blocks that have become full and computed in the prefix cache."""
        size = self.config.block_size
        cache.extend_hashes(request.block_hashes, request.tokens, request.cache_key)
        for index in range(request.registered, request.computed // size):
            request.last_cached = cache.insert(
                request.block_hashes[index],
                request.tokens[index * size : (index + 1) * size],
                request.cache_key,
                request.last_cached,
                request.block_ids[index],
            )
            request.registered = index + 1
