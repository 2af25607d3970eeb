"""Paged cache writes in C++ for CPUs (`_reshape_and_cache_cpu.cpp`), of keys and values and of MLA's latents."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.kv_cache.slots import check_slots
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

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
        check_slots(op, slot_mapping, blocks * block_size)  # says which slot, if that is what is wrong
        check(code, f"{op}_cpu")


def launch(
    config: Config, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """key [T, H, D], value [T, H, Dv] -> key_cache, value_cache [blocks, block_size, H, D or Dv] by slot_mapping [T]."""
    _store(config, "reshape_and_cache", key, key_cache, slot_mapping)
    _store(config, "reshape_and_cache", value, value_cache, slot_mapping)


def launch_mla(config: Config, latent: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """latent [T, D] -> cache [blocks, block_size, D] by slot_mapping [T]."""
    _store(config, "reshape_and_cache_mla", latent[:, None], cache[:, :, None], slot_mapping)


KERNELS = tuple(
    Kernel(
        op=op,
        name=f"{op}_cpu",
        provider="gristmill",
        language="cpp",
        target=f"{__name__}:{launcher}",
        requires=Requirement(vendors=("cpu",), code="cpp"),
        summary="tokens over threads, one memcpy a head",
        config=best_config("gm_cache_store"),
        batch_invariant=True,
        priority=100,
    )
    for op, launcher in (("reshape_and_cache", "launch"), ("reshape_and_cache_mla", "launch_mla"))
)
