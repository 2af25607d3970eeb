"""Paged attention in C++ for CPUs (`_paged_attention_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import CPU_DTYPE, dtype_name
from gristmill.kernels.native import best_config, check, cpu_function

ARGUMENTS = (c_void_p,) * 10 + (c_float, c_int)
_Sizes = c_int64 * 20


def launch(
    config: Config, q: Any, k_cache: Any, v_cache: Any, block_table: Any, query_start: Any, seq_lens: Any, max_q: int,
    max_ctx: int, scale: float, window: int, sinks: Any, lse: Any, workspace: Any, out: Any,
) -> None:  # fmt: skip
    """The arguments of `paged_attention.reference`, then out [tokens, heads, D]."""
    sizes = _Sizes(
        block_table.stride(0), q.stride(0), q.stride(1), out.stride(0), out.stride(1), *k_cache.stride()[:3],
        *v_cache.stride()[:3], seq_lens.shape[0], q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1], window,
        q.shape[0], k_cache.shape[0], block_table.shape[1],
    )  # fmt: skip
    code = cpu_function("gm_paged_attention", config["level"], ARGUMENTS)(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr(),
        None if sinks is None else sinks.data_ptr(), block_table.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
        sizes, scale, CPU_DTYPE[dtype_name(q.dtype)],
    )  # fmt: skip
    check(code, "paged_attention_cpu")


KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="online softmax over tiles of 32 keys, a KV head's queries together, float32 inside",
    config=best_config("gm_paged_attention"),
    sources=("_paged_attention_cpu.cpp", "_flash_cpu.h"),
    batch_invariant=True,
    priority=100,
)
