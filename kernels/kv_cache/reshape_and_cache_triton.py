"""Paged cache writes in Triton: one program per token and block of its elements; those of the values follow the keys'."""

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
from gristmill.kernels.kv_cache._quantize_and_cache_triton import launch_quantized, quantized_cases
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import ReshapeAndCacheCall


def _longest(problem: Problem) -> int:
    """Elements of a token's keys or values, whichever are more."""
    return problem.integer("h") * max(problem.integer("d"), problem.integer("dv"))


def config(problem: Problem, target: Target) -> Config:
    """Blocks of at most 1,024 elements of a token; of quantized caches rounded to whole heads."""
    return block_config(_longest(problem))


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Blocks from 256 to 4,096 elements."""
    return block_space(_longest(problem))


@jit
def reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_token,
    key_head,
    value_token,
    value_head,
    key_block,
    key_place,
    key_cache_head,
    value_block,
    value_place,
    value_cache_head,
    heads,
    block_size,
    slots,
    key_parts,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < slots):
        if part < key_parts:
            copy(
                key,
                key_cache,
                token,
                slot,
                part,
                key_token,
                key_head,
                key_block,
                key_place,
                key_cache_head,
                heads,
                D,
                block_size,
                BLOCK,
            )
        else:
            copy(
                value,
                value_cache,
                token,
                slot,
                part - key_parts,
                value_token,
                value_head,
                value_block,
                value_place,
                value_cache_head,
                heads,
                DV,
                block_size,
                BLOCK,
            )


def launch(config: Config, call: ReshapeAndCacheCall) -> None:
    """The arguments of `reshape_and_cache.reference`."""
    if call.k_scale is not None and call.v_scale is not None:
        launch_quantized(
            config,
            call.key,
            call.value,
            call.key_cache,
            call.value_cache,
            call.slot_mapping,
            call.k_scale,
            call.v_scale,
        )
        return
    tokens, heads, d = call.key.shape
    dv, block = call.value.shape[2], int(config["block"])
    blocks, block_size = call.key_cache.shape[:2]
    key_parts, value_parts = cdiv(heads * d, block), cdiv(heads * dv, block)
    if tokens:
        reshape_and_cache_kernel[(tokens, key_parts + value_parts)](
            call.key,
            call.value,
            call.key_cache,
            call.value_cache,
            call.slot_mapping,
            call.key.stride(0),
            call.key.stride(1),
            call.value.stride(0),
            call.value.stride(1),
            *call.key_cache.stride()[:3],
            *call.value_cache.stride()[:3],
            heads,
            block_size,
            blocks * block_size,
            key_parts,
            D=d,
            DV=dv,
            BLOCK=block,
            num_warps=config["warps"],
            **overlapped(call.key),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: eight heads of 128 in bf16, block strides past 2³¹ elements."""
    pointers = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16") | {"slot_mapping": "*i64"}
    names = (
        "key_token",
        "key_head",
        "value_token",
        "value_head",
        "key_block",
        "key_place",
        "key_cache_head",
        "value_block",
        "value_place",
        "value_cache_head",
        "heads",
        "block_size",
        "slots",
        "key_parts",
    )
    int64_names = ("key_block", "value_block")
    sizes = {name: "i64" if name in int64_names else "i32" for name in names}
    return [
        AotCase(
            "nhd",
            reshape_and_cache_kernel,
            pointers | sizes,
            {"D": 128, "DV": 128, "BLOCK": 1024} | overlap_on(target),
            {"num_warps": 4},
        ),
        *quantized_cases(target),
    ]


KERNEL = Kernel(
    op="reshape_and_cache",
    name="reshape_and_cache_triton",
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
