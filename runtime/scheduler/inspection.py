"""The state of a scheduler as values and as text, and what holds for it between two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.runtime.kv_cache import PoolError
from gristmill.runtime.scheduler.request import Request, RequestState

if TYPE_CHECKING:
    from gristmill.runtime.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise PoolError with a dump unless every invariant holds. O(everything): for tests and idle times."""
    scheduler.pool.check()
    if scheduler.cache is not None:
        scheduler.cache.check()
    owners = [0] * scheduler.config.num_blocks
    rows = list(scheduler.free_rows)
    for request in scheduler.requests.values():
        for block in request.block_ids:
            owners[block] += 1
        if request.row >= 0:
            rows.append(request.row)
        if problem := _problem(scheduler, request):
            raise PoolError(f"{problem}: {request!r}\n{scheduler.dump()}")
    references = scheduler.pool.refs
    if owners != references:
        wrong = [(b, n, r) for b, (n, r) in enumerate(zip(owners, references, strict=True)) if n != r]
        raise PoolError(f"(block, owners, references) that differ: {wrong}\n{scheduler.dump()}")
    if sorted(rows) != list(range(scheduler.config.max_seqs)):
        raise PoolError(f"each row is free or has one owner, but these are: {rows}\n{scheduler.dump()}")
    running, waiting, held = scheduler.running, scheduler.waiting, scheduler.held
    queued = sum(request.prompt_len for request in (*waiting, *held.values()))
    if scheduler.queued_tokens != queued:
        raise PoolError(
            f"{scheduler.queued_tokens} prompt tokens are said to wait, {queued} do\n{scheduler.dump()}"
        )
    if len(running) + len(waiting) + len(held) != len(scheduler.requests):
        raise PoolError(f"a request is in no queue, or in two\n{scheduler.dump()}")


def _problem(scheduler: Scheduler, request: Request) -> str:
    """What is wrong with a request's own state; "" if nothing is."""
    size = scheduler.config.block_size
    pending = in_flight = drafts = 0
    for plan in scheduler.in_flight:
        for entry in plan.entries:
            if entry.id == request.id and entry.block_ids is request.block_ids:
                pending += entry.samples
                in_flight += entry.count
                drafts += entry.drafts
    if request.pending != pending:
        return f"{request.pending} tokens are said to be pending, plans in flight sample {pending}"
    if len(request.block_ids) * size < request.computed:
        return "computed tokens without blocks"
    if request.computed - drafts >= len(request.tokens) + request.pending:
        return "nothing left to compute, so nothing to sample from"
    running = request.state is RequestState.RUNNING
    if running != (request.row >= 0) or (
        not running and (request.block_ids or request.computed or request.drafts)
    ):
        return "a row, blocks, computed tokens or drafts without running, or no row"
    cached = request.registered * size
    if cached > request.computed - in_flight or (request.last_cached is None) != (cached == 0):
        return f"{cached} tokens are registered: more than were computed, or not so"
    return ""


def snapshot(scheduler: Scheduler) -> tuple[object, ...]:
    """The whole state as values; equal snapshots mean equal states."""
    pool, cache = scheduler.pool, scheduler.cache
    return (
        scheduler.queued_tokens,
        scheduler.paused,
        tuple(id(plan) for plan in scheduler.in_flight),
        tuple(scheduler.free_rows),
        tuple(pool.refs),
        tuple(pool.queue()),
        tuple(id(content) for content in pool.content),
        pool.num_available,
        pool.num_cached,
        None if cache is None else tuple(sorted(cache.snapshot().items())),
        tuple(request.id for request in scheduler.running),
        tuple(request.id for request in scheduler.waiting),
        tuple(scheduler.held),
        tuple(request.snapshot() for request in scheduler.requests.values()),
    )


def dump(scheduler: Scheduler) -> str:
    """The state as text, for errors."""
    lines = [
        repr(scheduler.config),
        scheduler.pool.dump(),
        f"paused: {None if scheduler.paused is None else scheduler.paused.value}",
        f"steps in flight: {[[(entry.id, entry.start, entry.count) for entry in plan.entries] for plan in scheduler.in_flight]}",
    ]
    for name, requests in (
        ("running", scheduler.running),
        ("waiting", scheduler.waiting),
        ("held", scheduler.held.values()),
    ):
        lines.append(f"{name}: {len(requests)}")
        lines.extend(f"  {request!r}" for request in requests)
    return "\n".join(lines)
