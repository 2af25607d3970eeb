"""A fixed number of KV blocks, each free, cached or referenced.

    free        not referenced, without registered content
    cached      not referenced, but its content is registered: a later request may share it until it is evicted
    referenced  at least one request has it in its block table

Free and cached blocks are in one doubly linked queue: allocation takes from the front, so the order of the queue is
the order of eviction. A released block whose content was never registered goes to the front, one
with registered content to the tail (least recently used first). Taking, sharing and releasing one block are O(1).

One queue as both free list and LRU list is vLLM's design (V1 block pool); blocks and block tables are from
PagedAttention (Kwon et al., 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from typing import Any

from gristmill.kernel_registry.scheme import cdiv

LISTED = 100
"""The most entries that a text about a state lists, so that it stays readable however large the pool and the queues are."""


class PoolError(RuntimeError):
    """An operation that the state of the pool forbids, or an inconsistent state. Always a bug."""


class PoolOp(IntEnum):
    """An operation of `BlockPool.apply` on a list of blocks."""

    TAKE = 0
    SHARE = 1
    RELEASE = 2


def listed(items: Iterable[object], count: int, separator: str = ", ") -> str:
    """The first items as text, at most `LISTED` of `count`, and how many more there are."""
    shown = [str(item) for item in islice(items, LISTED)]
    return separator.join([*shown, f"and {count - len(shown)} more"] if count > len(shown) else shown)


def blocks_needed(tokens: int, block_size: int) -> int:
    """The number of blocks for `tokens` positions. Admission and allocation both use it."""
    return cdiv(tokens, block_size)


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens; ids are 0 .. num_blocks - 1, and num_blocks is the null block (`groups`).

    `on_evict(block, content)` is called when a block with registered content is reused.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs num_blocks >= 1 and block_size >= 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs: list[int] = [0] * num_blocks
        self.content: list[object | None] = [None] * num_blocks
        self.on_evict: Callable[[int, Any], None] | None = None
        self.num_available = num_blocks  # free + cached, the length of the queue
        self.num_cached = 0
        self.shares = 0  # owners that `share` has added so far
        # Links of the queue. Index num_blocks is the sentinel: its next is the front, its prev is the tail.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Number of blocks without content."""
        return self.num_available - self.num_cached

    @property
    def num_referenced(self) -> int:
        """Number of blocks in the table of a request."""
        return self.num_blocks - self.num_available

    def front(self) -> int:
        """First block of the queue, or `num_blocks` when the queue is empty."""
        return self._next[self.num_blocks]

    def after(self, block: int) -> int:
        """Block after `block` in the queue, or `num_blocks` at its end."""
        return self._next[block]

    def queue(self) -> list[int]:
        """The whole queue, front first. For tests: O(n)."""
        blocks: list[int] = []
        block = self.front()
        while block != self.num_blocks and len(blocks) <= self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front and evict the content of cached ones. All or nothing."""
        if not 0 <= count <= self.num_available:
            raise PoolError(f"{count} blocks asked for, {self.num_available} of {self.num_blocks} available")
        taken = []
        for _ in range(count):
            block = self.front()
            self.take(block)
            taken.append(block)
        return taken

    def take(self, block: int) -> None:
        """Give an unreferenced block to one owner; its registered content is evicted."""
        self._require_unreferenced(block)
        self._unlink(block)
        self.refs[block] = 1
        content = self.content[block]
        if content is not None:
            self.content[block] = None
            self.num_cached -= 1
            if self.on_evict is not None:
                self.on_evict(block, content)

    def share(self, block: int) -> None:
        """Add an owner to a referenced or cached block, which keeps its content."""
        if self.refs[block] == 0:
            if self.content[block] is None:
                raise PoolError(f"block {block} is free: it holds nothing to share")
            self._unlink(block)
            self.num_cached -= 1
        self.refs[block] += 1
        self.shares += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block of a table.

        From the last to the first, so that the children of a chain are evicted before their parents. Null blocks are skipped.
        """
        for block in reversed(blocks):
            if block == self.num_blocks:
                continue
            refs = self.refs[block] - 1
            if refs < 0:
                raise PoolError(f"block {block} released twice\n{self.dump()}")
            self.refs[block] = refs
            if refs == 0:
                if self.content[block] is None:
                    self._link(block, self.num_blocks, self._next[self.num_blocks])
                else:
                    self._link(block, self._prev[self.num_blocks], self.num_blocks)
                    self.num_cached += 1

    def apply(self, ops: Iterable[tuple[PoolOp, Sequence[int]]]) -> None:
        """Apply the operations that a `PoolTransaction` recorded."""
        for op, blocks in ops:
            if op is PoolOp.RELEASE:
                self.release(blocks)
            elif op is PoolOp.TAKE:
                for block in blocks:
                    self.take(block)
            else:
                for block in blocks:
                    self.share(block)

    def register(self, block: int, content: object) -> None:
        """Register the content of a referenced block, so that it becomes cached when its last owner releases it."""
        if self.refs[block] == 0:
            raise PoolError(f"block {block} is not referenced: its content cannot be trusted")
        if self.content[block] is not None:
            raise PoolError(f"block {block} already has registered content")
        self.content[block] = content

    def forget(self, block: int) -> None:
        """Drop the registered content of a block, without calling `on_evict`."""
        if self.content[block] is not None and self.refs[block] == 0:
            self.num_cached -= 1
        self.content[block] = None

    def check(self) -> None:
        """Raise PoolError with a dump unless free + cached + referenced = all and the queue is sound. O(n)."""
        queue = self.queue()
        problems = []
        if len(queue) != self.num_available:
            problems.append(f"queue holds {len(queue)} blocks, counter says {self.num_available}")
        if len(set(queue)) != len(queue):
            problems.append("a block stands in the queue twice")
        if any(self._prev[self._next[b]] != b for b in [*queue, self.num_blocks]):
            problems.append("links of the queue disagree")
        unreferenced = {b for b, refs in enumerate(self.refs) if refs == 0}
        if set(queue) != unreferenced:
            wrong = sorted(set(queue) ^ unreferenced)
            problems.append(f"queue and reference counts disagree on blocks {listed(wrong, len(wrong))}")
        if min(self.refs) < 0:
            problems.append("a reference count is negative")
        cached = sum(self.content[b] is not None for b in unreferenced)
        if cached != self.num_cached:
            problems.append(f"{cached} cached blocks, counter says {self.num_cached}")
        if problems:
            raise PoolError("block pool is inconsistent: " + "; ".join(problems) + "\n" + self.dump())

    def dump(self) -> str:
        """State of the pool as text: blocks by state and by number of owners, and the first ones of the queue."""
        owners = sorted(Counter(self.refs).items())
        shared = [f"{blocks} with {refs}" for refs, blocks in owners if refs]
        return (
            f"blocks: {self.num_free} free + {self.num_cached} cached + {self.num_referenced} referenced"
            f" = {self.num_blocks} of {self.block_size} tokens\n"
            f"blocks by owners: {listed(shared, len(shared)) or 'none has one'}\n"
            f"queue: {listed(self._first(), self.num_available) or 'empty'}"
        )

    def _first(self) -> Iterator[int]:
        block = self.front()
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def _require_unreferenced(self, block: int) -> None:
        if self.refs[block] != 0:
            raise PoolError(
                f"block {block} is referenced {self.refs[block]} times, it cannot be taken\n{self.dump()}"
            )

    def _unlink(self, block: int) -> None:
        before, behind = self._prev[block], self._next[block]
        self._next[before] = behind
        self._prev[behind] = before
        self.num_available -= 1

    def _link(self, block: int, before: int, behind: int) -> None:
        self._prev[block] = before
        self._next[block] = behind
        self._next[before] = block
        self._prev[behind] = block
        self.num_available += 1


class PoolTransaction:
    """An overlay on a `BlockPool`: answers and allocates as if its changes were made, without touching the pool.

    `ops` is what `BlockPool.apply` replays at commit; it is valid as long as the pool has not changed meanwhile.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._refs: dict[int, int] = {}  # reference counts of the blocks that the transaction has touched
        self._cursor = pool.front()  # the next block of the pool's queue to take
        self._front: list[int] = []  # released by this transaction without registered content: reused first
        self._tail: dict[
            int, None
        ] = {}  # released by this transaction with registered content: reused last, oldest first
        self.available = pool.num_available
        self.shares = pool.shares
        self.evicted: dict[int, None] = {}  # blocks whose registered content the transaction evicts, in order
        self.ops: list[tuple[PoolOp, Sequence[int]]] = []

    def refs(self, block: int) -> int:
        """Reference count of a block in the transaction."""
        count = self._refs.get(block)
        return self._pool.refs[block] if count is None else count

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks; the caller has checked `available`."""
        if not 0 <= count <= self.available:
            raise PoolError(f"{count} blocks asked for, {self.available} available in the transaction")
        taken = []
        for _ in range(count):
            block = self._next_victim()
            self._refs[block] = 1
            if self._pool.content[block] is not None:
                self.evicted[block] = None
            taken.append(block)
        self.available -= count
        self.ops.append((PoolOp.TAKE, taken))
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to blocks with registered content."""
        for block in blocks:
            refs = self.refs(block)
            if refs == 0:
                self.available -= 1
                self._tail.pop(block, None)
            self._refs[block] = refs + 1
        self.shares += len(blocks)
        self.ops.append((PoolOp.SHARE, list(blocks)))

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block, last to first as `BlockPool.release` does."""
        for block in reversed(blocks):
            if block == self._pool.num_blocks:
                continue
            refs = self.refs(block) - 1
            self._refs[block] = refs
            if refs == 0:
                self.available += 1
                if self._pool.content[block] is None or block in self.evicted:
                    self._front.append(block)
                else:
                    self._tail[block] = None
        self.ops.append((PoolOp.RELEASE, list(blocks)))

    def _next_victim(self) -> int:
        if self._front:
            return self._front.pop()
        end = self._pool.num_blocks
        block = self._cursor
        while block != end and block in self._refs:  # claimed earlier in this transaction
            block = self._pool.after(block)
        if block != end:
            self._cursor = self._pool.after(block)
            return block
        block = next(iter(self._tail))
        del self._tail[block]
        return block
