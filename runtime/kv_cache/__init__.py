"""Bookkeeping of the paged KV cache, on the host and without torch: which block belongs to whom, and what it holds.

A *block* is ``block_size`` consecutive token positions of one request in every layer's cache. This package deals in
block ids only; the tensors behind them belong to the runner.
"""

from gristmill.runtime.kv_cache.block_pool import BlockPool, PoolError, blocks_needed
from gristmill.runtime.kv_cache.pool_plan import PoolPlan
from gristmill.runtime.kv_cache.prefix_cache import CachedBlock, PrefixCache

__all__ = ["BlockPool", "CachedBlock", "PoolError", "PoolPlan", "PrefixCache", "blocks_needed"]
