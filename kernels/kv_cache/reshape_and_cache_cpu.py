"""Paged cache writes in C++ for CPUs, of keys and values and of MLA's latents: copies (`_reshape_and_cache_cpu.cpp`), and e4m3
codes (`_quantize_and_cache_cpu.cpp`)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.kv_cache.quantized import by_token, scale_strides
from gristmill.kernels.kv_cache.slots import check_slots
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import ReshapeAndCacheCall, ReshapeAndCacheMlaCall

ARGUMENTS = (
    c_void_p,
    c_int64,
    c_int64,
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    c_int64,
    c_int64,
)
_QUANTIZED = (*(c_void_p,) * 5, c_int)
_Sizes = c_int64 * 14


def _store(config: Config, op: str, tokens: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """tokens [T, H, D] -> cache [blocks, block_size, H, D]."""
    item = tokens.element_size()
    blocks, block_size = cache.shape[:2]
    code = cpu_function("gm_cache_store", config["level"], ARGUMENTS)(
        tokens.data_ptr(),
        tokens.stride(0) * item,
        tokens.stride(1) * item,
        cache.data_ptr(),
        *(step * item for step in cache.stride()[:3]),
        slot_mapping.data_ptr(),
        tokens.shape[0],
        tokens.shape[1],
        tokens.shape[2] * item,
        blocks,
        block_size,
    )
    if code:
        check_slots(op, slot_mapping, blocks * block_size)  # raises with the slot, if a slot is the fault
        check(code, f"{op}_cpu")


def _quantize(config: Config, tokens: Tensor, cache: Tensor, slot_mapping: Tensor, scale: Tensor) -> None:
    """tokens [T, H, D] -> codes in cache [blocks, block_size, H, D], by scale or, of tokens and heads, with their scales."""
    blocks, block_size = cache.shape[:2]
    sizes = _Sizes(
        *tokens.shape,
        blocks,
        block_size,
        *tokens.stride()[:2],
        *cache.stride()[:3],
        by_token(scale),
        *scale_strides(scale),
    )
    code = cpu_function("gm_cache_store_e4m3", config["level"], _QUANTIZED)(
        tokens.data_ptr(),
        cache.data_ptr(),
        scale.data_ptr(),
        slot_mapping.data_ptr(),
        sizes,
        DTYPE_CODES[dtype_name(tokens.dtype)],
    )
    if code:
        check_slots("reshape_and_cache", slot_mapping, blocks * block_size)
        check(code, "reshape_and_cache_cpu")


def launch(config: Config, call: ReshapeAndCacheCall) -> None:
    """The arguments of `reshape_and_cache.reference`."""
    for tokens, cache, scale in (
        (call.key, call.key_cache, call.k_scale),
        (call.value, call.value_cache, call.v_scale),
    ):
        if scale is None:
            _store(config, "reshape_and_cache", tokens, cache, call.slot_mapping)
        else:
            _quantize(config, tokens, cache, call.slot_mapping, scale)


def launch_mla(config: Config, call: ReshapeAndCacheMlaCall) -> None:
    """latent [T, D] -> cache [blocks, block_size, D] by slot_mapping [T]."""
    _store(config, "reshape_and_cache_mla", call.latent[:, None], call.cache[:, :, None], call.slot_mapping)


_COPY, _QUANTIZE = best_config("gm_cache_store"), best_config("gm_cache_store_e4m3")


def config(problem: Problem, target: Target) -> Config:
    """The code level of the copy, or of the quantization."""
    quantized = problem.as_dict().get("kv", "x") != "x"
    return (_QUANTIZE if quantized else _COPY)(problem, target)


KERNELS = tuple(
    Kernel(
        op=op,
        name=f"{op}_cpu",
        provider="gristmill",
        language="cpp",
        target=f"{__name__}:{launcher}",
        requires=Requirement(vendors=("cpu",), code="cpp"),
        summary="tokens over threads, one memcpy per head",
        config=config,
        batch_invariant=True,
        priority=100,
    )
    for op, launcher in (("reshape_and_cache", "launch"), ("reshape_and_cache_mla", "launch_mla"))
)
