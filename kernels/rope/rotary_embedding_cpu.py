"""Rotary embedding in C++ for CPUs (`_rotary_embedding_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import RotaryEmbeddingCall

ARGUMENTS = (
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    c_void_p,
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    c_int,
    c_int,
)


def launch(config: Config, call: RotaryEmbeddingCall) -> None:
    """q [T, Hq, D] and k [T, Hk, D] or None, in place; positions [T], cos_sin [P, rot]."""
    keys = (
        (None, 0, 0, 0)
        if call.k is None
        else (call.k.data_ptr(), call.k.stride(0), call.k.stride(1), call.k.shape[1])
    )
    code = cpu_function("gm_rotary_embedding", config["level"], ARGUMENTS)(
        call.q.data_ptr(),
        call.q.stride(0),
        call.q.stride(1),
        call.q.shape[1],
        *keys,
        call.positions.data_ptr(),
        call.cos_sin.data_ptr(),
        call.cos_sin.shape[0],
        call.q.shape[0],
        call.cos_sin.shape[1],
        int(call.interleaved),
        DTYPE_CODES[dtype_name(call.q.dtype)],
    )
    check(code, "rotary_embedding_cpu")


KERNEL = Kernel(
    op="rotary_embedding",
    name="rotary_embedding_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="tokens over threads, pairs over lanes, float32 inside",
    config=best_config("gm_rotary_embedding"),
    batch_invariant=True,
    priority=100,
)
