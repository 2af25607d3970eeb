"""Blocks between the paged cache of an engine and its stores, in the engine's thread and between its steps.

The verbs, in the order of a request:

    matched     a request waits while the blocks after its cached prefix are looked up, by another thread
    load        blocks that were found are put into blocks of the pool and registered in the prefix cache, where the scheduler finds them
    save        blocks of the prefix cache that were seen often enough are given to the carrier, and the rest is done by another thread
    preempted   so are all blocks of a request that loses them; when there is room again, it is matched like a new one
    wait        until something has arrived, while nothing else is to be done
    finished    a request that has ended waits for nothing

The scheduler does not know about transfers: a request that waits is held, and a load that fails or is late leaves it as it was. Its tokens are
computed then.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache import CachedBlock, PrefixCache
from gristmill.runtime.kv_transfer.carrier import Carrier, Found, Received
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.kv_transfer.identity import extend_keys, group_key
from gristmill.runtime.kv_transfer.lanes import Lane
from gristmill.runtime.kv_transfer.sightings import Sightings
from gristmill.runtime.kv_transfer.statistics import TransferStatus
from gristmill.runtime.scheduler import Request, RequestOutput, Scheduler

LOG = logging.getLogger("gristmill")

IDLE = 0.05
"""Longest wait in seconds: meanwhile no call of the engine is answered."""
MOST_SAVING = max(1 << 30, min(8 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8))
"""Bytes of copies on the host that wait to be written; beyond them blocks are not saved."""

LATE = "no answer within the timeout"
RAISED = "the store raised an error"
NO_ROOM = "no room in the cache"
EVICTED = "the prefix before the loaded blocks was evicted meanwhile"
TOO_MUCH = "too much waits to be saved"
NO_MEMORY = "no memory for the copy"


@dataclass(frozen=True, slots=True)
class _Loading:
    request: Request
    future: Future[Found]
    deadline: float


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Blocks of the cache that are being filled: `taken`, after those of `before`. Both are the transfer's until it has ended."""

    request: Request
    found: Found
    future: Future[Received]
    deadline: float
    before: list[int]
    taken: list[int]
    rows: list[int]


@dataclass(frozen=True, slots=True)
class _Saving:
    keys: list[bytes]
    nbytes: int


class Transfer:
    """The KV transfer of one engine, with the root of `root_key`. Not thread-safe."""

    def __init__(self, config: KVTransfer, scheduler: Scheduler, carrier: Carrier, root: bytes) -> None:
        if scheduler.cache is None:
            raise ValueError("blocks are found by the prefix cache, and the scheduler has none")
        self.config = config
        self.scheduler = scheduler
        self._cache: PrefixCache = scheduler.cache
        self._carrier, self._root = carrier, root
        self._size, self._windows = scheduler.config.block_size, scheduler.config.windows
        self._done = threading.Condition()
        self._loads, self._saves = Lane("kv-load", self._done), Lane("kv-save", self._done)
        self._close = weakref.finalize(self, _close, self._loads, self._saves)
        self._sightings = Sightings()
        self._keys: dict[str, list[bytes]] = {}  # by request, of its full blocks
        self._seen: dict[str, int] = {}  # by request, its blocks that were counted
        self._loading: dict[str, _Loading] = {}
        self._arriving: list[_Arriving] = []
        self._preempted: dict[str, Future[int] | None] = {}  # with what saves their blocks
        self._saving: dict[Future[int], _Saving] = {}
        self._failures: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        scheduler.on_preempt = self.preempted

    # Requests ----------------------------------------------------------------------------------------------------------

    def expects(self, request: Request) -> bool:
        """Whether a request may have blocks in a store: if so it is to be held, and given to `matched`."""
        return (
            self.config.load
            and request.reads_cache
            and request.cache_key is None
            and len(request.tokens) > self._size
            and self._answers()
        )

    def matched(self, request: Request, after: Future[int] | None = None) -> None:
        """Look for the blocks of a held request that the prefix cache does not have; `load` releases it. `after` is the work that saves them now."""
        keys, most = self._extended(request), (len(request.tokens) - 1) // self._size
        first = len(self._hits(request))
        if first >= most:
            self.scheduler.resume(request.id)
            return
        self._counts["queried_tokens"] += (most - first) * self._size
        seconds = self.config.timeout
        look_up = partial(self._carrier.find, tuple(keys[:most]), first, self._windows)
        work = look_up if after is None else partial(_when_ended, after, seconds, look_up)
        future = self._loads.submit(work)
        self._loading[request.id] = _Loading(request, future, time.monotonic() + seconds)

    def load(self) -> None:
        """Take over the blocks that have come, and release their requests and those that have waited too long. Between two steps."""
        self._collect()
        for name, loading in list(self._loading.items()):
            if not loading.future.done():
                if time.monotonic() < loading.deadline:
                    continue
                loading.future.cancel()
                self._late(name)
            del self._loading[name]
            arrives = not loading.future.cancelled() and loading.future.done() and self._take(loading)
            if not arrives:
                self.scheduler.resume(name)
        waiting = self.scheduler.waiting
        if waiting and waiting[0].id in self._preempted:
            self._look_again(waiting[0])

    def computed(self, request: Request, output: RequestOutput) -> None:
        """A request has got tokens: `save` its blocks after the prompt, and at the end."""
        begins = len(request.tokens) - len(output.new_ids) == request.prompt_len
        if begins or output.finish_reason is not None:
            self.save(request)

    def save(self, request: Request) -> None:
        """Count the blocks of a request in the prefix cache, and save those that were seen often enough."""
        after = self.config.save_after
        if not after or request.cache_key is not None:
            return
        keys, hits = self._extended(request), self._hits(request)
        due = []
        for index in range(self._seen.get(request.id, 0), len(hits)):
            for group, block in enumerate(hits[index].blocks):
                if block is not None:
                    key = group_key(keys[index], group)
                    if self._sightings.is_due(key, after):
                        due.append((key, block))
        self._seen[request.id] = len(hits)
        if due:
            self._copy(due)

    def preempted(self, request: Request) -> None:
        """As `Scheduler.on_preempt`: save everything that a request has computed, if the carrier can. What was saved before is looked up again."""
        full, groups = request.computed // self._size, len(self._windows)
        if not self.config.save_after or request.cache_key is not None or not full:
            return
        keys, null = self._extended(request), self.scheduler.pool.num_blocks
        chosen = [
            (group_key(keys[place // groups], place % groups), block)
            for place, block in enumerate(request.block_ids[: full * groups])
            if block != null
        ]
        new = [(key, block) for key, block in chosen if not self._sightings.was_saved(key)]
        future = self._copy(new) if new and self._carrier.sends_preempted else None
        if self.config.load:
            self._preempted[request.id] = future

    def finished(self, request_id: str) -> None:
        """A request has ended, in whatever state."""
        loading = self._loading.pop(request_id, None)
        if loading is not None:
            loading.future.cancel()
        for state in (self._keys, self._seen, self._preempted):
            state.pop(request_id, None)

    # The engine --------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until a load has arrived or is late, or blocks may be given back, but not longer than `IDLE`."""
        under_way: list[_Loading | _Arriving] = [*self._loading.values(), *self._arriving]
        if not under_way and not self.scheduler.lent:
            return
        until = min((one.deadline for one in under_way), default=math.inf) - time.monotonic()
        with self._done:
            self._done.wait_for(
                lambda: any(one.future.done() for one in under_way),
                max(0.0, min(IDLE, until)),
            )

    def flush(self, seconds: float) -> bool:
        """Wait until everything that was to be saved by now was given to the store; whether that was within `seconds`. From any thread."""
        return self._saves.wait(seconds)

    def new_weights(self) -> None:
        """The weights have changed: what was saved before belongs to others, and what is saved now is found by this engine alone."""
        self._root = secrets.token_bytes(32)
        self._carrier.new_root(self._root)
        for name, loading in list(self._loading.items()):
            loading.future.cancel()
            self.scheduler.resume(name)
        for state in (self._loading, self._keys, self._seen, self._preempted):
            state.clear()
        self._sightings.clear()

    def status(self) -> TransferStatus:
        """Counts so far."""
        self._collect_saved()
        row, counts = self._carrier.block_bytes, self._counts
        return TransferStatus(
            stores=tuple(self.config.stores),
            queried_tokens=counts["queried_tokens"],
            loaded_tokens=counts["loaded_tokens"],
            loaded_blocks=counts["loaded_blocks"],
            saved_blocks=counts["saved_blocks"],
            loaded_bytes=counts["loaded_blocks"] * row,
            saved_bytes=counts["saved_blocks"] * row,
            loading=len(self._loading) + len(self._arriving),
            saving=sum(len(saving.keys) for saving in self._saving.values()),
            answers=self._answers(),
            failures=dict(self._failures),
        )

    def settle(self) -> None:
        """Before the weights change: wait until no thread reads or writes the cache. UsageError: that takes longer than the timeout."""
        seconds = self.config.timeout
        if self._arriving or not self._carrier.stages:
            if not (self._loads.wait(seconds) and self._saves.wait(seconds)):
                raise UsageError(
                    f"blocks of the cache are being copied, for more than {seconds:g} s: try again"
                )
            self._collect()

    def sleep(self) -> None:
        """The cache is about to be given back, after `settle`."""
        self._carrier.sleep()

    def wake_up(self) -> None:
        """The cache was allocated again."""
        self._carrier.wake_up()

    def close(self) -> None:
        """End the threads after what they do now, and close the carrier."""
        self._close()
        self._carrier.close()

    # Mechanism ---------------------------------------------------------------------------------------------------------

    def _answers(self) -> bool:
        return self._loads.busy_for() < self.config.timeout

    def _extended(self, request: Request) -> list[bytes]:
        keys = self._keys.setdefault(request.id, [])
        extend_keys(keys, self._root, request.tokens, self._size)
        return keys

    def _hits(self, request: Request) -> list[CachedBlock]:
        self._cache.extend_hashes(request.block_hashes, request.tokens, request.cache_key)
        return self._cache.match(request.block_hashes, request.tokens, request.cache_key)

    def _look_again(self, request: Request) -> None:
        """The first of the queue was preempted: look up its blocks when there is room for it."""
        config = self.scheduler.config
        spare = int(config.watermark * config.num_blocks) if self.scheduler.running else 0
        if config.most_held(len(request.tokens)) > self.scheduler.pool.num_available - spare:
            return
        after = self._preempted.pop(request.id)
        if self.expects(request):
            self.scheduler.hold(request.id)
            self.matched(request, after)

    def _take(self, loading: _Loading) -> bool:
        """Put the blocks of a load into the pool and the prefix cache: the next step can share them. Whether the request has to wait for that."""
        try:
            found = loading.future.result()
        except Exception as error:  # a store is foreign code: its failure costs a computation, not the engine
            self._failed(RAISED, f"{type(error).__name__}: {error}")
            return False
        for reason, detail in found.failures:
            self._failed(reason, detail)
        for key in found.missing:
            self._sightings.lost(key)
        return found.content is not None and self._receive(loading, found)

    def _receive(self, loading: _Loading, found: Found) -> bool:
        """As `_take`, of blocks that were found."""
        request, pool, null = loading.request, self.scheduler.pool, self.scheduler.pool.num_blocks
        hits = self._hits(request)
        if len(hits) < found.first:
            self._failed(EVICTED, f"request {request.id!r}")
            return False
        if len(hits) >= found.length:
            return False
        rows = [row for row, (index, _) in enumerate(found.places) if index >= len(hits)]
        before = [block for block in self._cache.table(hits) if block != null]
        for block in before:
            pool.share(block)  # so that they are not what is evicted
        taken: list[int] = []
        kept = False
        try:
            if len(rows) > pool.num_available:
                self._failed(NO_ROOM, f"request {request.id!r}: {len(rows)} blocks")
                return False
            taken = pool.allocate(len(rows))
            work = self._carrier.receive(found, rows[0], taken)
            if work is None:
                self._register(request, found, rows, taken)
                return False
            future = self._loads.submit(work)
            self._arriving.append(_Arriving(request, found, future, loading.deadline, before, taken, rows))
            self.scheduler.lend([*before, *taken])
            kept = True
        except (torch.OutOfMemoryError, MemoryError, OSError) as error:
            self._failed(NO_MEMORY, str(error))
        finally:
            if not kept:
                pool.release([*before, *taken])
        return kept

    def _register(self, request: Request, found: Found, rows: Sequence[int], taken: Sequence[int]) -> None:
        """Register blocks that hold what was found at `rows` of its places in the prefix cache, if it has what is before them."""
        cache, size, null = self._cache, self._size, self.scheduler.pool.num_blocks
        block_of = dict(zip((found.places[row] for row in rows), taken, strict=True))
        hits = self._hits(request)
        if not found.places[rows[0]][0] <= len(hits) < found.length:
            return  # it was emptied, or somebody else has computed them
        parent = hits[-1] if hits else None
        for index in range(len(hits), found.length):
            blocks = (block_of.get((index, group), null) for group in range(len(self._windows)))
            parent = cache.insert(
                request.block_hashes[index],
                request.tokens[index * size : (index + 1) * size],
                request.cache_key,
                parent,
                *blocks,
            )
        self._counts["loaded_blocks"] += len(taken)
        self._counts["loaded_tokens"] += (found.length - len(hits)) * size
        for index, group in found.places[: rows[-1] + 1]:
            self._sightings.saved(group_key(self._keys[request.id][index], group))

    def _collect(self) -> None:
        """What other threads have ended, and what others need no more."""
        self._collect_saved()
        for arriving in [one for one in self._arriving if one.future.done()]:
            self._arriving.remove(arriving)
            self._arrived(arriving)
        now = time.monotonic()
        for arriving in self._arriving:
            if now >= arriving.deadline and arriving.request.id in self.scheduler.held:
                self._late(arriving.request.id)
                self.scheduler.resume(arriving.request.id)
        for key in self._carrier.collect():
            self._sightings.lost(key)

    def _arrived(self, arriving: _Arriving) -> None:
        request, found = arriving.request, arriving.found
        try:
            received = arriving.future.result()
            for reason, detail in received.failures:
                self._failed(reason, detail)
            whole = arriving.rows[: received.whole]
            if received.whole < len(arriving.rows):
                found.length = found.places[arriving.rows[received.whole]][0]
            current = self.scheduler.requests.get(request.id) is request and request.id in self._keys
            if current and whole:  # it has not ended, and the weights are the same
                self._register(request, found, whole, arriving.taken[: len(whole)])
        except Exception as error:  # of a driver or a transport: it costs a computation
            self._failed(RAISED, f"{type(error).__name__}: {error}")
        finally:
            self.scheduler.give_back([*arriving.before, *arriving.taken])
        if self.scheduler.held.get(request.id) is request:
            self.scheduler.resume(request.id)

    def _copy(self, chosen: list[tuple[bytes, int]]) -> Future[int] | None:
        """Save blocks under their keys. None if too much is being saved."""
        nbytes = len(chosen) * self._carrier.block_bytes if self._carrier.stages else 0
        if nbytes + sum(saving.nbytes for saving in self._saving.values()) > MOST_SAVING:
            self._failed(TOO_MUCH, f"{len(chosen)} blocks")
            return None
        keys = [key for key, _ in chosen]
        try:
            work = self._carrier.send(keys, [block for _, block in chosen])
        except (torch.OutOfMemoryError, MemoryError, OSError) as error:
            self._failed(NO_MEMORY, str(error))
            return None
        future = self._saves.submit(work)
        self._saving[future] = _Saving(keys, nbytes)
        for key in keys:
            self._sightings.saved(key)
        return future

    def _collect_saved(self) -> None:
        for future in [future for future in self._saving if future.done()]:
            saving = self._saving.pop(future)
            try:
                self._counts["saved_blocks"] += future.result()
            except Exception as error:  # as of a load
                self._failed(RAISED, f"{type(error).__name__}: {error}")
                for key in saving.keys:
                    self._sightings.lost(key)

    def _late(self, request_id: str) -> None:
        self._failed(LATE, f"request {request_id!r}: {self.config.timeout:g} s")

    def _failed(self, reason: str, detail: str) -> None:
        """Count a failure, and log the first of its kind."""
        if not self._failures[reason]:
            LOG.warning("KV transfer with %s: %s (%s)", "+".join(self.config.stores), reason, detail)
        self._failures[reason] += 1


def _when_ended(other: Future[Any], seconds: float, work: Callable[[], Found]) -> Found:
    """Do work after other work has ended, or `seconds` have passed."""
    wait([other], seconds)
    return work()


def _close(*lanes: Lane) -> None:
    for lane in lanes:
        lane.close()
