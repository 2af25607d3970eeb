"""Paged attention in Triton, for every device Triton reaches: one tile for every batch, or split contexts for decode."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.tiles import DEFAULT_MULTIPROCESSORS, packing, tile_config

LARGEST_HEAD = 256


def accepts(problem: Problem) -> str | None:
    """Heads of up to 256 elements: wider ones do not fit in registers."""
    dim = problem.integer("head_dim")
    return f"head_dim {dim} is over {LARGEST_HEAD}" if dim > LARGEST_HEAD else None


def config(problem: Problem, target: Target) -> Config:
    """One tile whatever the batch is: the same row then always takes the same steps."""
    dim = problem.integer("head_dim")
    return tile_config(
        dim, dim, problem.text("x"), 32 if problem.text("x") == "fp32" or dim > 128 else 64, target
    )


def split_config(problem: Problem, target: Target) -> Config:
    """Large tiles for prefill; for decode the smallest that tensor cores take, and enough programs to fill the device."""
    dim, x = problem.integer("head_dim"), problem.text("x")
    decode = tile_config(dim, dim, x, 16, target)
    prefill = tile_config(dim, dim, x, 32 if x == "fp32" else 64 if dim > 128 else 128, target)
    return {
        **prefill,
        "decode_m": 16,
        "decode_n": decode["n"],
        "decode_warps": decode["warps"],
        "programs": 4 * (target.multiprocessors or DEFAULT_MULTIPROCESSORS),
    }


def split_space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles and warps around the default."""
    base = split_config(problem, target)
    found = []
    for rows, keys, warps in ((128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 64, 4), (64, 32, 4)):
        for decode_keys, decode_warps in ((32, 2), (64, 4), (128, 4)):
            for programs in (2, 4, 8):
                found.append(
                    {
                        **base,
                        "m": rows,
                        "n": keys,
                        "warps": warps,
                        "decode_n": decode_keys,
                        "decode_warps": decode_warps,
                        "programs": programs * (target.multiprocessors or DEFAULT_MULTIPROCESSORS),
                    }
                )
    return found


def split_workspace(problem: Problem, config: Config) -> Workspace:
    """Partial results of the parts, at the worst seqs and lengths that the problem's tokens can come in.

    A call of t tokens has at least t / tile_q sequences to split among, so tokens · splits is bounded by both terms.
    """
    heads, kv_heads = problem.integer("heads"), problem.integer("kv_heads")
    head_tiles, tile_q = packing(heads // kv_heads, int(config["decode_m"]))
    rows = problem.integer("q_tokens") + int(config["programs"]) * tile_q // (kv_heads * head_tiles)
    return Workspace(rows * heads * (problem.integer("head_dim") + 1) * 4)


KERNELS = (
    Kernel(
        op="paged_attention",
        name="paged_attention_triton",
        provider="gristmill",
        language="triton",
        target="gristmill.kernels.attention._paged_attention_triton:launch",
        aot="gristmill.kernels.attention._paged_attention_triton:aot",
        requires=Requirement(code="triton"),
        summary="a tile of queries and the heads of a KV head at a time, one pass over the context",
        accepts=accepts,
        config=config,
        batch_invariant=True,
        priority=50,
    ),
    Kernel(
        op="paged_attention",
        name="paged_attention_triton_split",
        provider="gristmill",
        language="triton",
        target="gristmill.kernels.attention._paged_attention_triton:launch_split",
        aot="gristmill.kernels.attention._paged_attention_triton:aot_split",
        requires=Requirement(code="triton"),
        summary="as paged_attention_triton; decode splits the context over programs and merges",
        accepts=accepts,
        config=split_config,
        space=split_space,
        workspace=split_workspace,
        priority=55,
    ),
)
