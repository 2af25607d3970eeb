"""Absorbed latent attention in Triton, for every device Triton reaches: whole contexts, or split ones for small batches."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.tiles import DEFAULT_MULTIPROCESSORS, mla_config, packing

LARGEST_LATENT = 512


def accepts(problem: Problem) -> str | None:
    """Latents of up to 512 elements: wider ones do not fit in registers."""
    latent = problem.integer("latent_dim")
    return f"latent_dim {latent} is over {LARGEST_LATENT}" if latent > LARGEST_LATENT else None


def config(problem: Problem, target: Target) -> Config:
    """One tile whatever the batch is, contexts whole: the same row then always takes the same steps."""
    tile = mla_config(
        problem.integer("latent_dim"), problem.integer("rope_dim"), problem.text("x"), 16, target
    )
    return {**tile, "programs": 0}


def split_config(problem: Problem, target: Target) -> Config:
    """As `config`, with enough parts to fill the device."""
    return {**config(problem, target), "programs": 2 * (target.multiprocessors or DEFAULT_MULTIPROCESSORS)}


def split_space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles, warps and numbers of parts around the default."""
    base = split_config(problem, target)
    count = target.multiprocessors or DEFAULT_MULTIPROCESSORS
    return [
        {**base, "m": rows, "n": keys, "warps": warps, "stages": stages, "programs": programs * count}
        for rows, keys, warps in ((16, 16, 4), (16, 32, 4), (16, 32, 8), (32, 32, 8), (64, 32, 8))
        for stages in (1, 2)
        for programs in (1, 2, 4)
    ]


def split_workspace(problem: Problem, config: Config) -> Workspace:
    """Partial results of the parts, at the worst seqs and lengths that the problem's tokens can come in."""
    heads = problem.integer("heads")
    head_tiles, tile_q = packing(heads, int(config["m"]))
    rows = problem.integer("q_tokens") + int(config["programs"]) * 2 * tile_q // head_tiles
    return Workspace(rows * heads * (problem.integer("latent_dim") + 1) * 4)


KERNELS = (
    Kernel(
        op="mla_attention",
        name="mla_attention_triton",
        provider="gristmill",
        language="triton",
        target="gristmill.kernels.attention._mla_attention_triton:launch",
        aot="gristmill.kernels.attention._mla_attention_triton:aot",
        requires=Requirement(code="triton"),
        summary="16 heads or queries at a time, a cache tile being key and value, one pass over the context",
        accepts=accepts,
        config=config,
        batch_invariant=True,
        priority=50,
    ),
    Kernel(
        op="mla_attention",
        name="mla_attention_triton_split",
        provider="gristmill",
        language="triton",
        target="gristmill.kernels.attention._mla_attention_triton:launch",
        aot="gristmill.kernels.attention._mla_attention_triton:aot_split",
        requires=Requirement(code="triton"),
        summary="as mla_attention_triton, contexts split over programs and merged",
        accepts=accepts,
        config=split_config,
        space=split_space,
        workspace=split_workspace,
        priority=55,
    ),
)
