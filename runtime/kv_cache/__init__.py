"""The paged KV cache.

A *block* is ``block_size`` consecutive token positions of one request in the cache of every layer of a group. The bookkeeping, which block
belongs to which request and what it contains, is on the host and uses block ids only (`block_pool`, `prefix_cache`, `groups`,
`events`); names exported here import no torch. The tensors are in `paged`, or in memory of the caller in `external`; `format` is how they
store keys and values, `size` how many blocks there are.
"""

from gristmill.runtime.kv_cache.block_pool import BlockPool, PoolError, PoolTransaction, blocks_needed
from gristmill.runtime.kv_cache.prefix_cache import CachedBlock, PrefixCache

__all__ = ["BlockPool", "CachedBlock", "PoolError", "PoolTransaction", "PrefixCache", "blocks_needed"]
