"""The state of a scheduler, as values and as text, and what holds for it between two calls."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from gristmill.runtime.kv_cache import BlockPool, PoolError, PrefixCache
from gristmill.runtime.kv_cache.block_pool import listed
from gristmill.runtime.kv_cache.groups import first_needed
from gristmill.runtime.scheduler.config import SchedulerConfig
from gristmill.runtime.scheduler.request import Request, RequestState
from gristmill.runtime.scheduler.step import ScheduledStep


class Pause(Enum):
    """The work that a paused scheduler schedules. Requests may be added during a pause; they wait."""

    NEW = "new"  # requests that have been admitted before continue, no other is admitted
    ALL = "all"  # nothing; requests keep their blocks


class SchedulerState:
    """Requests by queue, blocks, rows, and the steps in flight."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.cache = PrefixCache(self.pool, windows=config.windows) if config.prefix_caching else None
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # always sorted by queue_key
        self.held: dict[str, Request] = {}
        self.queued_tokens = 0  # prompt tokens of waiting and held requests
        self.lent: Counter[int] = (
            Counter()
        )  # references to blocks that somebody reads or writes who is no request
        self.paused: Pause | None = None
        self.in_flight: list[ScheduledStep] = []  # committed, waiting for results; oldest first
        self.free_rows = list(range(config.max_seqs - 1, -1, -1))  # the lowest one is taken first
        self._version = 0
        self._arrivals = 0

    def _steady(self, request: Request) -> int:
        """`Request.steady` of a running request: 0 if it has drafts, or more than a token to compute."""
        if request.drafts or len(request.tokens) + request.pending - request.computed != 1:
            return 0
        blocks = len(request.block_ids) // len(self.config.windows)
        return min(request.limit - 1, blocks * self.config.block_size)

    def check(self) -> None:
        """Raise PoolError with a dump unless every invariant holds. O(everything): for tests and idle times."""
        self.pool.check()
        if self.cache is not None:
            self.cache.check()
        owners = [self.lent[block] for block in range(self.config.num_blocks)]
        rows = list(self.free_rows)
        for request in self.requests.values():
            for block in request.block_ids:
                if block != self.pool.num_blocks:
                    owners[block] += 1
            if request.row >= 0:
                rows.append(request.row)
            if problem := self._problem(request):
                raise PoolError(f"{problem}: {request!r}\n{self.dump()}")
        references = self.pool.refs
        if owners != references:
            wrong = [(b, n, r) for b, (n, r) in enumerate(zip(owners, references, strict=True)) if n != r]
            raise PoolError(
                f"(block, owners, references) that differ: {listed(wrong, len(wrong))}\n{self.dump()}"
            )
        if sorted(rows) != list(range(self.config.max_seqs)):
            raise PoolError(f"each row is free or has one owner, but these are: {rows}\n{self.dump()}")
        running, waiting, held = self.running, self.waiting, self.held
        queued = sum(request.prompt_len for request in (*waiting, *held.values()))
        if self.queued_tokens != queued:
            raise PoolError(
                f"{self.queued_tokens} prompt tokens are said to wait, {queued} do\n{self.dump()}"
            )
        if len(running) + len(waiting) + len(held) != len(self.requests):
            raise PoolError(f"a request is in no queue, or in two\n{self.dump()}")

    def _problem(self, request: Request) -> str:
        """What is wrong with a request's own state; "" if nothing is."""
        size, windows = self.config.block_size, self.config.windows
        pending = in_flight = drafts = 0
        for step in self.in_flight:
            for entry in step.entries:
                if entry.id == request.id and entry.block_ids is request.block_ids:
                    pending += entry.samples
                    in_flight += entry.count
                    drafts += entry.drafts
        if request.pending != pending:
            return f"{request.pending} tokens are said to be pending, steps in flight sample {pending}"
        if len(request.block_ids) // len(windows) * size < request.computed:
            return "computed tokens without blocks"
        for group, window in enumerate(windows):
            first = first_needed(window, request.computed - in_flight, size)
            blocks = request.block_ids[group :: len(windows)]
            if blocks != [self.pool.num_blocks] * first + [b for b in blocks if b != self.pool.num_blocks]:
                return f"group {group} lacks a block that it needs, or has one before its window"
        if request.computed - drafts >= len(request.tokens) + request.pending:
            return "nothing left to compute, so nothing to sample from"
        running = request.state is RequestState.RUNNING
        if request.steady != (self._steady(request) if running else 0):
            return "steps are said to be steady up to another position"
        if running != (request.row >= 0) or (
            not running and (request.block_ids or request.computed or request.drafts)
        ):
            return "a row, blocks, computed tokens or drafts without running, or no row"
        cached = request.registered * size
        if cached > request.computed - in_flight or (request.last_cached is None) != (cached == 0):
            return f"{cached} tokens are registered: more than were computed, or not so"
        return ""

    def dump(self) -> str:
        """The state as text, for errors; of long lists the first entries."""
        lines = [
            repr(self.config),
            self.pool.dump(),
            f"paused: {None if self.paused is None else self.paused.value}",
            f"steps in flight: {len(self.in_flight)}, blocks lent: {len(self.lent)}",
        ]
        for step in self.in_flight:
            entries = ((entry.id, entry.start, entry.count) for entry in step.entries)
            lines.append(f"  {listed(entries, len(step.entries))}")
        for name, requests in (
            ("running", self.running),
            ("waiting", self.waiting),
            ("held", self.held.values()),
        ):
            lines.append(f"{name}: {len(requests)}")
            if requests:
                lines.append("  " + listed(requests, len(requests), "\n  "))
        return "\n".join(lines)
