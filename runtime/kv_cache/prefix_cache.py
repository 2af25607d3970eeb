"""Sharing of full KV blocks between requests with a common prefix.

The content of a full block is identified by a chained hash: hash(hash of the parent, token ids, extra key). A hash is only a
lookup key: a hit also compares the tokens, the extra key and the chain of parents, so a collision costs a miss and
never gives a wrong answer. Blocks are registered when they are full *and computed*, never earlier.

Chained block hashes are vLLM's automatic prefix caching; comparing tokens on a hit is nano-vllm's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from gristmill.runtime.kv_cache.block_pool import BlockPool, PoolError
from gristmill.runtime.kv_cache.events import EventLog

HashFunction = Callable[[tuple[int, tuple[int, ...], Hashable]], int]


class CachedBlock:
    """One registered content: the tokens of a block and, through `parent`, everything before them."""

    __slots__ = ("__weakref__", "block", "extra", "hash", "parent", "tokens")

    def __init__(
        self, hash_: int, tokens: tuple[int, ...], extra: Hashable, parent: CachedBlock | None, block: int
    ) -> None:
        self.hash = hash_
        self.tokens = tokens
        self.extra = extra
        self.parent = parent
        self.block = block


def same_prefix(a: CachedBlock | None, b: CachedBlock | None) -> bool:
    """True when both chains hold the same tokens from the root on. Usually they are one object, and this is O(1)."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens or a.extra != b.extra:
            return False
        a, b = a.parent, b.parent
    return True


class PrefixCache:
    """Finds and registers full blocks in `pool`. One cache per pool: it sets the pool's `on_evict`. events: None = not recorded."""

    def __init__(self, pool: BlockPool, hash_function: HashFunction = hash) -> None:
        if pool.on_evict is not None:
            raise ValueError("the pool already serves another prefix cache")
        self._pool = pool
        self._hash = hash_function
        self._table: dict[int, CachedBlock] = {}
        self.events: EventLog | None = None
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._table)

    def extend_hashes(self, hashes: list[int], tokens: Sequence[int], extra: Hashable = None) -> None:
        """Append the hashes of the full blocks of `tokens` that `hashes` does not have yet."""
        size = self._pool.block_size
        parent = hashes[-1] if hashes else 0
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent = self._hash((parent, tuple(tokens[start : start + size]), extra))
            hashes.append(parent)

    def match(
        self, hashes: Sequence[int], tokens: Sequence[int], extra: Hashable = None
    ) -> list[CachedBlock]:
        """Longest registered prefix of `tokens`, in blocks. Changes nothing.

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
        return hits

    def insert(
        self, hash_: int, tokens: Sequence[int], extra: Hashable, parent: CachedBlock | None, block: int
    ) -> CachedBlock:
        """Register a full, computed, referenced block; returns the entry of its content.

        If the content is already registered with another block, that entry is returned and this block remains
        unregistered (tables are append-only: duplicates are not merged). After a collision the block also remains
        unregistered; the returned entry is then used only by the chain that continues it.
        """
        content = tuple(tokens)
        if len(content) != self._pool.block_size:
            raise PoolError(f"only full blocks are cached: {len(content)} of {self._pool.block_size} tokens")
        entry = self._table.get(hash_)
        if entry is None:
            entry = CachedBlock(hash_, content, extra, parent, block)
            self._pool.register(block, entry)
            self._table[hash_] = entry
            if self.events is not None:
                self.events.stored(hash_, None if parent is None else parent.hash, content, extra)
        elif entry.tokens != content or entry.extra != extra or not same_prefix(entry.parent, parent):
            entry = CachedBlock(hash_, content, extra, parent, block)
        return entry

    def clear(self) -> None:
        """Forget all contents. Blocks of requests stay theirs, and are not shared."""
        for entry in self._table.values():
            self._pool.forget(entry.block)
        self._table.clear()
        if self.events is not None:
            self.events.cleared()

    def check(self) -> None:
        """Raise PoolError unless the table and the pool have the same entries."""
        registered = {id(content) for content in self._pool.content if content is not None}
        if registered != {id(entry) for entry in self._table.values()}:
            raise PoolError(
                f"{len(self._table)} cached contents, {len(registered)} registered blocks: they differ"
            )
        for hash_, entry in self._table.items():
            if entry.hash != hash_ or self._pool.content[entry.block] is not entry:
                raise PoolError(f"cached content of block {entry.block} differs from the pool's")

    def snapshot(self) -> dict[int, int]:
        """{hash: block}, for comparing states."""
        return {hash_: entry.block for hash_, entry in self._table.items()}

    def _max_hit(self, tokens: int) -> int:
        return (tokens - 1) // self._pool.block_size

    def _forget(self, entry: CachedBlock) -> None:
        del self._table[entry.hash]
        if self.events is not None:
            self.events.removed(entry.hash)
