"""The paged KV cache.

A *block* is ``block_size`` consecutive token positions of one request in the cache of every layer of a group. Which block belongs to which
request, and what it contains, is decided on the host by block ids alone (`block_pool`, `prefix_cache`, `groups`, `events`); the names exported
here import no torch. The tensors and their format are in `paged`, tensors of the caller in `external`, and the number of blocks in `size`.

Per layer, K and V are ``[blocks, block_size, kv_heads, head_dim]`` views of one allocation; MLA's cache is ``[blocks, block_size, 576]``.
``block_table`` is int32 ``[seqs, max_blocks]``, ``slot_mapping`` int64 ``[tokens]`` with -1 for tokens that are not written. Scales of an fp8
cache are float32 and broadcast over it: ``[1, 1, 1]`` (per tensor), ``[1, 1, kv_heads]`` (per head), or ``[blocks, block_size, kv_heads]`` (per
token and head), next to the cache. Codes of another format would be another value of the operations' axis ``kv``.

Layers with a sliding window need only the last tokens of a request: they form a group (`groups`). When the results of a step are there, blocks
before the window of every later query return to the pool. Their places in the table hold the null block, one more than the pool has, which
stays zero: a kernel that loads whole tiles may load it, and masks it. A prefix is found if every group can continue it: full attention needs
all of its blocks, a window those of its last tokens; each group in turn shortens the prefix until all agree. Admission counts for a window
the blocks of the window and of one step. A cache of the caller, tensor parallelism and a draft model use one group, which keeps all tokens.
"""

from gristmill.runtime.kv_cache.block_pool import BlockPool, PoolError, PoolTransaction, blocks_needed
from gristmill.runtime.kv_cache.prefix_cache import CachedBlock, PrefixCache

__all__ = ["BlockPool", "CachedBlock", "PoolError", "PoolTransaction", "PrefixCache", "blocks_needed"]
