"""Merging partial attentions in C++ for CPUs (`_merge_attention_states_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import MergeAttentionStatesCall

ARGUMENTS = (*(c_void_p,) * 6, c_int64, c_int64, c_int)


def launch(config: Config, call: MergeAttentionStatesCall) -> None:
    """a, b [T, H, D] with a_lse, b_lse [T, H] -> out [T, H, D], lse [T, H]."""
    tokens, heads, d = call.a.shape
    code = cpu_function("gm_merge_attention_states", config["level"], ARGUMENTS)(
        call.a.data_ptr(),
        call.a_lse.data_ptr(),
        call.b.data_ptr(),
        call.b_lse.data_ptr(),
        call.out.data_ptr(),
        call.lse.data_ptr(),
        tokens * heads,
        d,
        DTYPE_CODES[dtype_name(call.a.dtype)],
    )
    check(code, "merge_attention_states_cpu")


KERNEL = Kernel(
    op="merge_attention_states",
    name="merge_attention_states_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="rows over threads, elements over lanes, float32 inside",
    config=best_config("gm_merge_attention_states"),
    batch_invariant=True,
    priority=100,
)
