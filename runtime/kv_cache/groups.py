"""Groups of layers whose caches hold the same tokens: full attention keeps all of a request, a sliding window its last ones.

Every group has as many layers of the same geometry, so a block has the same bytes in each, and one pool of ids serves all. A request
has a block table per group. One list holds them, interleaved: its entry ``index * groups + group`` is the block of the tokens
``index * block_size`` and on. A place whose block was given back holds the null block, ``num_blocks``, which is never written.

A layer with a state of constant size would be a group with another answer of `first_needed`. Groups are vLLM's hybrid cache manager.
"""

from __future__ import annotations


def first_needed(window: int, computed: int, block_size: int) -> int:
    """Index of the first block that queries at positions from `computed` on read; what is before it may be given back. window: 0 = all."""
    return max(0, computed - window + 1) // block_size if window else 0
