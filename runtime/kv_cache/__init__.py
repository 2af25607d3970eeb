"""Bookkeeping of the paged KV cache, on the host and without torch: the owner and the content of each block.

A *block* is ``block_size`` consecutive token positions of one request in the cache of every layer of a group. This package uses
block ids only; the tensors belong to the runner.
"""

from gristmill.runtime.kv_cache.block_pool import BlockPool, PoolError, blocks_needed
from gristmill.runtime.kv_cache.pool_plan import PoolPlan
from gristmill.runtime.kv_cache.prefix_cache import CachedBlock, PrefixCache

__all__ = ["BlockPool", "CachedBlock", "PoolError", "PoolPlan", "PrefixCache", "blocks_needed"]
