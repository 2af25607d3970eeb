"""Paged writes of MLA latents in Triton: one program per token and block of its elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.kv_cache._copy_triton import block_config, block_space, copy
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import ReshapeAndCacheMlaCall


def config(problem: Problem, target: Target) -> Config:
    """Blocks of at most 1,024 elements of a token."""
    return block_config(problem.integer("d"))


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Blocks from 256 to 4,096 elements."""
    return block_space(problem.integer("d"))


@jit
def reshape_and_cache_mla_kernel(
    latent,
    cache,
    slot_mapping,
    latent_token,
    cache_block,
    cache_place,
    block_size,
    slots,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < slots):
        copy(
            latent,
            cache,
            token,
            slot,
            tl.program_id(1),
            latent_token,
            0,
            cache_block,
            cache_place,
            0,
            1,
            D,
            block_size,
            BLOCK,
        )


def launch(config: Config, call: ReshapeAndCacheMlaCall) -> None:
    """latent [T, D] -> cache [blocks, block_size, D] by slot_mapping [T]."""
    (tokens, d), block = call.latent.shape, int(config["block"])
    blocks, block_size = call.cache.shape[:2]
    if tokens:
        reshape_and_cache_mla_kernel[(tokens, cdiv(d, block))](
            call.latent,
            call.cache,
            call.slot_mapping,
            call.latent.stride(0),
            call.cache.stride(0),
            call.cache.stride(1),
            block_size,
            blocks * block_size,
            D=d,
            BLOCK=block,
            num_warps=config["warps"],
            **overlapped(call.latent),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: DeepSeek's latent in bf16."""
    pointers = {"latent": "*bf16", "cache": "*bf16", "slot_mapping": "*i64"}
    sizes = dict.fromkeys(("latent_token", "cache_block", "cache_place", "block_size", "slots"), "i32")
    return [
        AotCase(
            "mla",
            reshape_and_cache_mla_kernel,
            pointers | sizes,
            {"D": 576, "BLOCK": 1024} | overlap_on(target),
            {"num_warps": 4},
        )
    ]


KERNEL = Kernel(
    op="reshape_and_cache_mla",
    name="reshape_and_cache_mla_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per token and block of its elements",
    config=config,
    space=space,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
