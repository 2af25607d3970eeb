"""Norm, rotary embedding and cache write in C++ for CPUs (`_qk_norm_rope_cache_cpu.cpp`): the same bits as the kernels of the three
operations at the same code level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.kv_cache.slots import check_slots
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import QkNormRopeCacheCall

ENTRY = CallEntry("gm_qk_norm_rope_cache", "qk_norm_rope_cache")
_LEVEL = best_config("gm_qk_norm_rope_cache")
LONGEST_QUANTIZED_HEAD = 1024


def launch(config: Config, call: QkNormRopeCacheCall) -> None:
    """The arguments of `qk_norm_rope_cache.reference`, then q [T, Hq, D]."""
    try:
        ENTRY.cpu(config, call)
    except ValueError:
        check_slots(
            "qk_norm_rope_cache", call.slot_mapping, call.key_cache.shape[0] * call.key_cache.shape[1]
        )
        raise


def config(problem: Problem, target: Target) -> Config:
    """The code level, and whether weights of norms are float32."""
    return {**_LEVEL(problem, target), "wide": problem["w"] == "fp32"}


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
    config=config,
    supports=("w",),
    batch_invariant=True,
    priority=100,
)
