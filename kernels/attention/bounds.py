"""Attention of decode steps whose time does not depend on the bound of contexts that it is launched for: its kernels find their work on the device,
by the lengths there.

On an H200 decode steps of Qwen3-0.6B took the same time, within 0.7 %, from graphs for contexts up to 512, 4,096 and 40,960 tokens, with 1, 8, 64 and
256 sequences of 300 tokens, and of 1,000 and 3,000 from those that hold them (bench/results/h200/decode_graphs.json).
"""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.attention.paged_attention.sm90.spec import route


def takes_any_bound(kernel: str, config: Config, problem: Problem, max_q: int) -> bool:
    """Whether a call of a kernel with at most `max_q` new tokens of each sequence takes as long for a longer `max_ctx`.

    Args:
        problem: a static problem of attention over a paged cache.
    """
    if kernel != "paged_attention_sm90_split":
        return False
    heads, kv_heads, dim = (problem.integer(name) for name in ("heads", "kv_heads", "head_dim"))
    codes, page = problem["kv"] != "x", problem.integer("block_size")
    return route(max_q, heads, kv_heads, int(config["ctas"]), dim, codes, page) == "decode"
