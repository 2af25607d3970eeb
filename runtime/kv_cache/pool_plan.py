"""Changes to a block pool that are planned now and applied later, or dropped."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.runtime.kv_cache.block_pool import BlockPool, PoolError, PoolOp


class PoolPlan:
    """An overlay on a `BlockPool`: answers and allocates as if its changes were made, without touching the pool.

    `ops` is what `BlockPool.apply` replays at commit; it is valid as long as the pool has not changed meanwhile.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._refs: dict[int, int] = {}  # planned reference counts of the blocks that the plan has touched
        self._cursor = pool.front()  # the next block of the pool's queue to take
        self._front: list[int] = []  # released by this plan without registered content: reused first
        self._tail: dict[
            int, None
        ] = {}  # released by this plan with registered content: reused last, oldest first
        self.available = pool.num_available
        self.evicted: dict[int, None] = {}  # blocks whose registered content the plan evicts, in order
        self.ops: list[tuple[PoolOp, Sequence[int]]] = []

    def refs(self, block: int) -> int:
        """Reference count of a block under the plan."""
        count = self._refs.get(block)
        return self._pool.refs[block] if count is None else count

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks; the caller has checked `available`."""
        if not 0 <= count <= self.available:
            raise PoolError(f"{count} blocks asked for, {self.available} available under the plan")
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
        while block != end and block in self._refs:  # claimed earlier in this plan
            block = self._pool.after(block)
        if block != end:
            self._cursor = self._pool.after(block)
            return block
        block = next(iter(self._tail))
        del self._tail[block]
        return block
