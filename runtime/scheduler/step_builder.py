"""Builds one step. It reads the scheduler and writes only to itself, and memos (`Request.refusal`), so a step can be dropped without effect.

Order of a step: running requests that need one token (decode) first, so that no prompt can starve them; then running
prompts; then the waiting queue, unless a request had to be preempted. The order of service and preemption by
recomputation follow vLLM's V1 scheduler. Candidates are read from a list that never shifts, so a
preemption cannot skip a request.

A step that is built while another is in flight counts the token that the other one samples for each request, although its id is not
known. It preempts no request: if blocks are lacking, the results come first.
"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.kv_cache import CachedBlock, PoolTransaction, PrefixCache
from gristmill.runtime.scheduler.config import SchedulerConfig
from gristmill.runtime.scheduler.policy import Admission, admission, choose_victim
from gristmill.runtime.scheduler.request import Request
from gristmill.runtime.scheduler.step import Decode, ScheduledRequest, ScheduledStep

NO_BLOCKS: tuple[int, ...] = ()
LOOKAHEAD = 64  # blocked requests that one step skips at most; bounds the cost of a step with a long queue
SHARED_TOKENS = 256  # of a prefix that another request is computing; for fewer a request does not wait


class _ResultsFirst(Exception):
    """The step can be built only when the steps in flight have ended."""


class StepBuilder:
    """The state while one step is built. `ahead` says whether another step is in flight."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PoolTransaction,
        cache: PrefixCache | None,
        version: int,
        ahead: bool = False,
    ) -> None:
        self.config = config
        self.pool = pool
        self.cache = cache
        self.ahead = ahead
        self.step = ScheduledStep(version, pool=pool)
        self.budget = config.max_batch_tokens
        self.prefill_tokens = 0  # prompt tokens in the step so far
        self.scheduled: dict[
            str, ScheduledRequest
        ] = {}  # besides the step's entries, which are plain decodes
        self.gone: set[str] = set()  # preempted by this step

    def run(self, running: Sequence[Request], waiting: Sequence[Request]) -> ScheduledStep:
        """Build a step over the running requests and the sorted queue. Empty if the results of the steps in flight come first."""
        try:
            return self._run(running, waiting)
        except _ResultsFirst:
            return ScheduledStep(self.step.version)

    def _run(self, running: Sequence[Request], waiting: Sequence[Request]) -> ScheduledStep:
        entries = self.step.entries
        decodes: list[Request] = []  # those that need a block, or have drafts
        prefills: list[Request] = []
        for request in running:
            start = request.computed
            if start < request.steady:
                tokens = None if request.pending else [request.tokens[-1]]
                entries.append(Decode(request.id, start, tokens, request.block_ids, request.row))
            elif len(request.tokens) + request.pending - start != 1:
                prefills.append(request)
            elif start + 1 < request.limit:  # otherwise a step in flight samples its last token
                decodes.append(request)
        self.budget -= len(entries)
        self._add_decodes(decodes, running)
        for request in prefills:
            if request.id not in self.gone:
                self._add_prefill(request, running)
        if not self.gone:
            self._admit(running, prefills, waiting)
        entries += self.scheduled.values()
        self.step.num_tokens = self.config.max_batch_tokens - self.budget
        return self.step

    def _add_decodes(self, decodes: Sequence[Request], running: Sequence[Request]) -> None:
        places = self.config.places
        left = len(decodes)
        for request in decodes:
            left -= 1
            if request.id in self.gone:
                continue
            start = request.computed
            on_device = request.pending > 0
            drafts = self._affordable_drafts(request, left) if request.drafts and not on_device else 0
            new: Sequence[int] = NO_BLOCKS
            lacking = places(start + 1 + drafts) - len(request.block_ids)
            if lacking > 0:
                if lacking > self.pool.available:  # drop drafts before preempting a request
                    drafts = 0
                    lacking = places(start + 1) - len(request.block_ids)
                if not self._make_room(lacking, request, running):
                    continue
                if lacking > 0:
                    new = self.pool.take(lacking)
            tokens = None if on_device else [request.tokens[-1], *request.drafts[:drafts]]
            if drafts:
                self.step.has_drafts = True
            self._schedule(request, start, tokens, True, new, drafts)

    def _affordable_drafts(self, request: Request, decodes_left: int) -> int:
        """Drafts that fit the batch and the request's limits, and leave room for the other decodes."""
        outputs_left = request.limit - len(request.tokens)
        return max(0, min(len(request.drafts), outputs_left - 1, self.budget - 1 - decodes_left))

    def _add_prefill(self, request: Request, running: Sequence[Request]) -> None:
        count = self._chunk(request.computed, len(request.tokens))
        if count == 0:
            return
        start = request.computed
        lacking = self.config.places(start + count) - len(request.block_ids)
        if lacking > 0 and not self._make_room(lacking, request, running):
            return
        new = self.pool.take(lacking) if lacking > 0 else NO_BLOCKS
        self._schedule_chunk(request, start, count, new)

    def _chunk(self, start: int, known: int) -> int:
        """Prompt tokens that this step computes from `start` on; 0: not in this step."""
        config = self.config
        count = min(known - start, self.budget)
        if config.max_chunk is not None:
            count = min(count, config.max_chunk)
        if config.inter_prefill_budget is not None and self.prefill_tokens:
            count = min(count, config.inter_prefill_budget - self.prefill_tokens)
        if config.align_chunks:
            # The prompt's last chunk starts at its last block boundary, as it does after the longest possible hit.
            boundary = (known - 1) // config.block_size * config.block_size
            if start < boundary:
                end = min(start + count, boundary)
                count = end // config.block_size * config.block_size - start
            elif start + count < known:
                count = 0
        return max(0, count)

    def _make_room(self, blocks: int, request: Request, running: Sequence[Request]) -> bool:
        """Preempt until `blocks` are available; False if `request` itself was preempted."""
        while blocks > self.pool.available:
            if self.ahead:
                raise _ResultsFirst
            victim = choose_victim(self.config, (r for r in running if r.id not in self.gone))
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        entry = self.scheduled.pop(victim.id, None)
        place = next((i for i, e in enumerate(self.step.entries) if e.id == victim.id), None)
        if place is not None:
            entry = self.step.entries.pop(place)
        blocks = victim.block_ids
        if entry is not None:  # already scheduled in this step: undo that
            self.budget += entry.count
            if not (entry.samples and entry.count == 1 + entry.drafts):
                self.prefill_tokens -= entry.count
            blocks = [*blocks, *entry.new_blocks]
        self.pool.release(blocks)
        self.gone.add(victim.id)
        self.step.preempted.append(victim.id)

    def _admit(
        self, running: Sequence[Request], prefills: Sequence[Request], waiting: Sequence[Request]
    ) -> None:
        config = self.config
        null = config.num_blocks
        seats = config.max_seqs - len(running)
        # Blocks that admitted prompts still need after this step.
        owed = sum(
            max(0, config.most_held(len(r.tokens)) - len(r.block_ids) + r.block_ids.count(null) - new)
            for r in prefills
            for new in (len(self.scheduled[r.id].new_blocks) if r.id in self.scheduled else 0,)
        )
        keep = int(config.watermark * config.num_blocks)
        skipped: list[Request] = []
        deferred, coming = 0, self._coming(running) if waiting else set()
        for request in waiting:
            # Every admission needs at least one new block, because at least one token is not cached.
            if seats == 0 or self.budget == 0 or self.pool.available - owed <= 0:
                return
            known = len(request.tokens)
            spare = keep if running or self.step.admitted else 0
            room = self.pool.available - owed - spare
            need, length = self._least_need(request) if running else (0, 0)
            unknown = need == 0 or need <= room
            hits: list[CachedBlock] = []
            if unknown:
                hits = self._hits(request)
                length = len(hits)
            if self._is_coming(request, length, coming):  # waits a step rather than compute the same
                deferred += 1
                if deferred == LOOKAHEAD:
                    return
                continue
            start = length * config.block_size
            count = self._chunk(start, known)
            if count == 0:
                return
            table: list[int] = []
            shared: list[int] = []
            if unknown:
                # Shared blocks that are not referenced yet are no longer available either.
                table = self.cache.table(hits) if self.cache is not None else []
                shared = [block for block in table if block != null]
                need = config.most_held(known) - sum(self.pool.refs(block) > 0 for block in shared)
                request.refusal = (length, need, self.pool.shares)
            if admission(need, room, config.num_blocks) is not Admission.ADMIT:
                # Scheduler.add has refused NEVER; a skipped request keeps its place in the queue.
                skipped.append(request)
                if not self._may_bypass(skipped):
                    return
                continue
            if shared:
                self.pool.share(shared)
            fresh = self.pool.take(config.places(start + count) - len(table))
            owed += max(0, config.most_held(known) - len(shared) - len(fresh))
            self.step.admitted[request.id] = hits
            self._schedule_chunk(request, start, count, table + fresh)
            coming.update(request.block_hashes[len(hits) : (start + count) // config.block_size])
            seats -= 1
            for older in skipped:
                self.step.bypassed[older.id] = self.step.bypassed.get(older.id, 0) + 1
            if not self._may_bypass(skipped):
                return

    def _may_bypass(self, skipped: Sequence[Request]) -> bool:
        """False if max_bypass younger requests have passed a request that waits for blocks."""
        now = self.step.bypassed
        return len(skipped) < LOOKAHEAD and all(
            r.bypassed + now.get(r.id, 0) < self.config.max_bypass for r in skipped
        )

    def _least_need(self, request: Request) -> tuple[int, int]:
        """Blocks without which a waiting request cannot be admitted, and how many of it are in the prefix cache, as the last try has found them;
        0 and 0 if they may have become fewer since.

        To find out again takes as long as its prompt is, in every step while it waits. What it needs becomes less only where others get blocks
        that it could share, or compute the one after those. Blocks that are evicted and computed again by others are overlooked, until there is
        room without them, others share blocks, or nothing runs.
        """
        if request.refusal is None or len(self.config.windows) > 1:
            return 0, 0
        length, need, shares = request.refusal
        most = (len(request.tokens) - 1) // self.config.block_size  # one token is always computed
        longer = self.cache is not None and length < most and request.block_hashes[length] in self.cache
        return (0, 0) if longer or shares != self.pool.shares else (need, length)

    def _hits(self, request: Request) -> list[CachedBlock]:
        if self.cache is None or not request.reads_cache:
            return []
        evicted = self.pool.evicted  # reassigned by this step
        return self.cache.match(request.block_hashes, request.tokens, request.cache_key, evicted)

    def _coming(self, running: Sequence[Request]) -> set[int]:
        """Hashes of the blocks that this step and those in flight compute: from the next step's results on they can be shared."""
        size, coming = self.config.block_size, set[int]()
        for request in running:
            entry = self.scheduled.get(request.id)
            end = request.computed if entry is None else entry.start + entry.count
            if end - request.registered * size >= SHARED_TOKENS:
                coming.update(request.block_hashes[request.registered : end // size])
        return coming

    def _is_coming(self, request: Request, hits: int, coming: set[int]) -> bool:
        """Whether SHARED_TOKENS more of the prompt are being computed. Once their results are there, they are hits, or no longer being computed."""
        last = hits + cdiv(SHARED_TOKENS, self.config.block_size) - 1
        hashes = request.block_hashes
        return request.reads_cache and last < len(hashes) and hashes[last] in coming

    def _schedule_chunk(self, request: Request, start: int, count: int, new: Sequence[int]) -> None:
        end = start + count
        self.prefill_tokens += count
        self._schedule(request, start, request.tokens[start:end], end == len(request.tokens), new, 0)

    def _schedule(
        self,
        request: Request,
        start: int,
        tokens: list[int] | None,
        samples: bool,
        new: Sequence[int],
        drafts: int,
    ) -> None:
        count = 1 if tokens is None else len(tokens)
        self.budget -= count
        self.scheduled[request.id] = ScheduledRequest(
            request.id, start, count, samples, tokens, request.block_ids, new, drafts, request.row
        )
