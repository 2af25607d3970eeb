"""The paged KV cache.

A *block* is ``block_size`` consecutive token positions of one request in the cache of every layer of a group. Which block belongs to which
request, and what it contains, is decided on the host by block ids alone (`block_pool`, `prefix_cache`, `groups`, `events`); the names exported
here import no torch. The tensors and their format are in `paged`, tensors of the caller in `external`, and the number of blocks in `size`.
"""

from gristmill.runtime.kv_cache.block_pool import BlockPool, PoolError, PoolTransaction, blocks_needed
from gristmill.runtime.kv_cache.prefix_cache import CachedBlock, PrefixCache

__all__ = ["BlockPool", "CachedBlock", "PoolError", "PoolTransaction", "PrefixCache", "blocks_needed"]
