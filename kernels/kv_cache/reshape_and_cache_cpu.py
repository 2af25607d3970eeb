"""Paged cache writes in C++ for CPUs, of keys and values and of MLA's latents: copies (`_reshape_and_cache_cpu.cpp`), and e4m3
codes (`_quantize_and_cache_cpu.cpp`)."""

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
    from gristmill.kernels.calls import ReshapeAndCacheCall, ReshapeAndCacheMlaCall

COPY = CallEntry("gm_cache_store", "reshape_and_cache")
QUANTIZE = CallEntry("gm_cache_store_e4m3", "reshape_and_cache")
COPY_MLA = CallEntry("gm_cache_store_mla", "reshape_and_cache_mla")


def launch(config: Config, call: ReshapeAndCacheCall) -> None:
    """The arguments of `reshape_and_cache.reference`."""
    try:
        (COPY if call.k_scale is None else QUANTIZE).cpu(config, call)
    except ValueError:
        check_slots("reshape_and_cache", call.slot_mapping, call.key_cache.shape[0] * call.key_cache.shape[1])
        raise


def launch_mla(config: Config, call: ReshapeAndCacheMlaCall) -> None:
    """latent [T, D] -> cache [blocks, block_size, D] by slot_mapping [T]."""
    try:
        COPY_MLA.cpu(config, call)
    except ValueError:
        check_slots("reshape_and_cache_mla", call.slot_mapping, call.cache.shape[0] * call.cache.shape[1])
        raise


_COPY_LEVEL, _QUANTIZE_LEVEL = best_config("gm_cache_store"), best_config("gm_cache_store_e4m3")


def config(problem: Problem, target: Target) -> Config:
    """The code level of the copy, or of the quantization."""
    quantized = problem.as_dict().get("kv", "x") != "x"
    return (_QUANTIZE_LEVEL if quantized else _COPY_LEVEL)(problem, target)


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
