"""Norm, rotary embedding and cache write in C++ for CPUs (`_qk_norm_rope_cache_cpu.cpp`): the same bits as the kernels of the three
operations at the same code level."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.kv_cache.quantized import by_token, scale_strides
from gristmill.kernels.kv_cache.slots import check_slots
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import QkNormRopeCacheCall

ARGUMENTS = (*(c_void_p,) * 3, c_float, *(c_void_p,) * 9, c_int)
LONGEST_QUANTIZED_HEAD = 1024
_Sizes = c_int64 * 24


def launch(config: Config, call: QkNormRopeCacheCall) -> None:
    """The arguments of `qk_norm_rope_cache.reference`, then q [T, Hq, D]."""
    blocks, block_size, kv_heads, _ = call.key_cache.shape
    sizes = _Sizes(
        call.q.shape[0],
        call.q.shape[1],
        kv_heads,
        call.q.shape[2],
        call.qkv.stride(0),
        call.qkv.stride(1),
        *call.cos_sin.shape,
        call.interleaved,
        blocks,
        block_size,
        call.k_scale is not None and by_token(call.k_scale),
        *call.key_cache.stride()[:3],
        *call.value_cache.stride()[:3],
        *scale_strides(call.k_scale),
        *scale_strides(call.v_scale),
    )
    code = cpu_function("gm_qk_norm_rope_cache", config["level"], ARGUMENTS)(
        call.qkv.data_ptr(),
        None if call.q_weight is None else call.q_weight.data_ptr(),
        None if call.k_weight is None else call.k_weight.data_ptr(),
        call.eps,
        call.positions.data_ptr(),
        call.cos_sin.data_ptr(),
        call.key_cache.data_ptr(),
        call.value_cache.data_ptr(),
        call.slot_mapping.data_ptr(),
        None if call.k_scale is None else call.k_scale.data_ptr(),
        None if call.v_scale is None else call.v_scale.data_ptr(),
        call.q.data_ptr(),
        sizes,
        DTYPE_CODES[dtype_name(call.qkv.dtype)],
    )
    if code:
        check_slots(
            "qk_norm_rope_cache", call.slot_mapping, blocks * block_size
        )  # raises if a slot is the fault
        check(code, "qk_norm_rope_cache_cpu")


def accepts(problem: Problem) -> str | None:
    """Quantized caches of heads that fit a buffer on the stack, and all others."""
    if problem.text("kv") == "x" or problem.integer("head_dim") <= LONGEST_QUANTIZED_HEAD:
        return None
    return f"quantizes heads of at most {LONGEST_QUANTIZED_HEAD} elements, not {problem['head_dim']}"


KERNEL = Kernel(
    op="qk_norm_rope_cache",
    name="qk_norm_rope_cache_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tokens over threads, a head at a time: norm, rotation, cache",
    accepts=accepts,
    config=best_config("gm_qk_norm_rope_cache"),
    batch_invariant=True,
    priority=100,
)
