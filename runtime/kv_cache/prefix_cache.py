"""Sharing of full KV blocks between requests with a common prefix.

The content of a full block is identified by a chained hash: hash(hash of the parent, token ids, extra key). A hash is only a
lookup key: a hit also compares the tokens, the extra key and the chain of parents, so a collision costs a miss and
never gives a wrong answer. Blocks are registered when they are full *and computed*, never earlier.

With several groups (`groups`) a content has a block per group, evicted one by one. A prefix is found if each group has what queries
after it read: all of its blocks, or those of its last window.

Chained block hashes are vLLM's automatic prefix caching; comparing tokens on a hit is nano-vllm's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence

from gristmill.runtime.kv_cache.block_pool import BlockPool, PoolError
from gristmill.runtime.kv_cache.events import AllBlocksCleared, CacheEvent, EventLog
from gristmill.runtime.kv_cache.groups import first_needed

HashFunction = Callable[[tuple[int, tuple[int, ...], Hashable]], int]


class CachedBlock:
    """One registered content: the tokens of a block and, through `parent`, everything before them. `blocks` has its block in each group, or None."""

    __slots__ = ("__weakref__", "blocks", "extra", "hash", "parent", "tokens")

    def __init__(
        self, hash_: int, tokens: tuple[int, ...], extra: Hashable, parent: CachedBlock | None, groups: int
    ) -> None:
        self.hash = hash_
        self.tokens = tokens
        self.extra = extra
        self.parent = parent
        self.blocks: list[int | None] = [None] * groups


def same_prefix(a: CachedBlock | None, b: CachedBlock | None) -> bool:
    """True when both chains hold the same tokens from the root on. Usually they are one object, and this is O(1)."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens or a.extra != b.extra:
            return False
        a, b = a.parent, b.parent
    return True


class PrefixCache:
    """Finds and registers full blocks in `pool`. There is one per pool: it sets the pool's `on_evict`. `windows` are of the groups, the first 0."""

    def __init__(
        self, pool: BlockPool, hash_function: HashFunction = hash, windows: Sequence[int] = (0,)
    ) -> None:
        if pool.on_evict is not None:
            raise ValueError("the pool already serves another prefix cache")
        self._pool = pool
        self._hash = hash_function
        self._windows = windows
        self._table: dict[int, CachedBlock] = {}
        self._events: EventLog | None = None  # of the blocks of the first group
        self.on_forget: Callable[[Iterable[int]], None] | None = (
            None  # called with blocks that hold their content no more
        )
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, hash_: int) -> bool:
        """Whether a content with this hash is registered; only `match` says whether it is the one that is looked for."""
        return hash_ in self._table

    def extend_hashes(self, hashes: list[int], tokens: Sequence[int], extra: Hashable = None) -> None:
        """Append the hashes of the full blocks of `tokens` that `hashes` does not have yet."""
        size = self._pool.block_size
        parent = hashes[-1] if hashes else 0
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent = self._hash((parent, tuple(tokens[start : start + size]), extra))
            hashes.append(parent)

    def match(
        self,
        hashes: Sequence[int],
        tokens: Sequence[int],
        extra: Hashable = None,
        evicted: Container[int | None] = (),
    ) -> list[CachedBlock]:
        """Longest prefix of `tokens` that every group can continue, without the blocks `evicted`. Changes nothing.

        Never all of them: at least one token must be computed, because sampling needs the logits of the last one.
        """
        size = self._pool.block_size
        hits: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for index in range(self._max_hit(len(tokens))):
            entry = self._table.get(hashes[index])
            if (
                entry is None
                or entry.extra != extra
                or entry.tokens != tuple(tokens[index * size : (index + 1) * size])
                or not same_prefix(entry.parent, parent)
            ):
                break
            hits.append(entry)
            parent = entry
        length, group, agreed = len(hits), 0, 0
        while agreed < len(self._windows):  # each group can only shorten the prefix, until all agree
            shorter = self._longest(hits, length, group, evicted)
            agreed = agreed + 1 if shorter == length else 1
            length, group = shorter, (group + 1) % len(self._windows)
        return hits[:length]

    def table(self, hits: Sequence[CachedBlock]) -> list[int]:
        """The block tables of a request that begins after `hits`, interleaved, with null blocks where a group needs none."""
        size, null, count = self._pool.block_size, self._pool.num_blocks, len(hits)
        starts = [first_needed(window, count * size, size) for window in self._windows]
        return [
            null if block is None or index < start else block
            for index, hit in enumerate(hits)
            for block, start in zip(hit.blocks, starts, strict=True)
        ]

    def _longest(
        self, hits: Sequence[CachedBlock], length: int, group: int, evicted: Container[int | None]
    ) -> int:
        """The longest prefix of at most `length` blocks after which this group has the blocks that it needs."""
        window, size = self._windows[group], self._pool.block_size
        index = length - 1
        while index >= first_needed(window, length * size, size):
            block = hits[index].blocks[group]
            if block is None or block in evicted:
                length = index
            index -= 1
        return length

    def insert(
        self, hash_: int, tokens: Sequence[int], extra: Hashable, parent: CachedBlock | None, *blocks: int
    ) -> CachedBlock:
        """Register full, computed, referenced blocks, one per group; returns the entry of their content.

        A block of a group that has another one for the content remains unregistered (duplicates are not merged).
        After a collision the blocks also remain unregistered; the returned entry is then used only by the chain that continues it.
        """
        content = tuple(tokens)
        if len(content) != self._pool.block_size:
            raise PoolError(f"only full blocks are cached: {len(content)} of {self._pool.block_size} tokens")
        entry = self._table.get(hash_)
        if entry is None:
            entry = self._table[hash_] = CachedBlock(hash_, content, extra, parent, len(blocks))
        elif entry.tokens != content or entry.extra != extra or not same_prefix(entry.parent, parent):
            return CachedBlock(hash_, content, extra, parent, len(blocks))
        for group, block in enumerate(blocks):
            if entry.blocks[group] is None and block != self._pool.num_blocks:
                self._pool.register(block, entry)
                entry.blocks[group] = block
                if group == 0 and self._events is not None:
                    self._events.stored(hash_, None if parent is None else parent.hash, content, extra)
        return entry

    def clear(self) -> None:
        """Forget all contents. Blocks of requests stay theirs, and are not shared."""
        for entry in self._table.values():
            for block in entry.blocks:
                if block is not None:
                    self._pool.forget(block)
        self._table.clear()
        if self.on_forget is not None:
            self.on_forget(range(self._pool.num_blocks))
        if self._events is not None:
            self._events.cleared()

    def record_events(self, record: bool) -> None:
        """Record events for `take_events` from now on, or no more. The first ones say what the cache holds already, also when it
        records already."""
        known = self._events is None and not self._table
        self._events = EventLog(self._pool.num_blocks, stale=not known) if record else None

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call, in order. Those of more blocks than the pool has are not kept: then an AllBlocksCleared and
        what the cache holds stand for them."""
        if self._events is None:
            return []
        if not self._events.stale:
            return self._events.take()
        self._events = EventLog(self._pool.num_blocks)
        return [AllBlocksCleared(), *self._contents()]

    def _contents(self) -> list[CacheEvent]:
        """All blocks of the first group as stored, parents before their children."""
        log, seen = EventLog(), set[int]()
        for last in self._table.values():
            chain: list[CachedBlock] = []
            entry: CachedBlock | None = last
            while entry is not None and entry.hash not in seen and self._table.get(entry.hash) is entry:
                seen.add(entry.hash)
                chain.append(entry)
                entry = entry.parent
            for entry in reversed(chain):
                if entry.blocks[0] is not None:
                    parent = None if entry.parent is None else entry.parent.hash
                    log.stored(entry.hash, parent, entry.tokens, entry.extra)
        return log.take()

    def check(self) -> None:
        """Raise PoolError unless the table and the pool have the same entries."""
        registered = {
            block: content for block, content in enumerate(self._pool.content) if content is not None
        }
        cached = {b: entry for entry in self._table.values() for b in entry.blocks if b is not None}
        if registered != cached:
            raise PoolError(
                f"(block, content) of the pool and of the cache differ: {registered.items() ^ cached.items()}"
            )
        for hash_, entry in self._table.items():
            if entry.hash != hash_ or entry.blocks == [None] * len(entry.blocks):
                raise PoolError(f"cached content of blocks {entry.blocks} has another hash, or no block")

    def _max_hit(self, tokens: int) -> int:
        return (tokens - 1) // self._pool.block_size

    def _forget(self, block: int, entry: CachedBlock) -> None:
        group = entry.blocks.index(block)
        entry.blocks[group] = None
        if entry.blocks.count(None) == len(entry.blocks):
            del self._table[entry.hash]
        if group == 0 and self._events is not None:
            self._events.removed(entry.hash)
        if self.on_forget is not None:
            self.on_forget((block,))
