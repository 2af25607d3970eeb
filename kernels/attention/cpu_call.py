"""The call of the C++ attention core, `gm_attention` of `_attention_cpu.cpp`, shared by the CPU kernels."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import ConfigValue
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.kv_cache.quantized import by_token, scale_strides
from gristmill.kernels.native import check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

_ARGUMENTS = (*(c_void_p,) * 12, c_float, c_float, c_int)
_Sizes = c_int64 * 28


def attend(
    name: str,
    level: ConfigValue,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    query_start: Tensor,
    starts: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    lse: Tensor | None,
    out: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """k and v [blocks, block_size, kv_heads, D] with block_table and starts = seq_lens [seqs], or, without a block_table,
    [1, keys, kv_heads, D] and starts = context_start [seqs + 1]. v may begin where k does (latent attention). k_scale and
    v_scale: of k and v in e4m3, as in `kv_cache.quantized`. softcap: of the scores, 0 = none.

    ValueError when an index tensor names a token, block or key that does not exist.
    """
    blocks, block_size, kv_heads, _ = k.shape
    sizes = _Sizes(
        q.shape[0],
        q.shape[1],
        kv_heads,
        q.shape[2],
        v.shape[3],
        query_start.shape[0] - 1,
        block_size if block_table is None else blocks,
        max(block_size, 1),
        0 if block_table is None else block_table.shape[1],
        window,
        0 if block_table is None else block_table.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *k.stride()[:3],
        *v.stride()[:3],
        k_scale is not None and by_token(k_scale),
        *scale_strides(k_scale),
        *scale_strides(v_scale),
    )
    code = cpu_function("gm_attention", level, _ARGUMENTS)(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if block_table is None else block_table.data_ptr(),
        query_start.data_ptr(),
        starts.data_ptr(),
        None if k_scale is None else k_scale.data_ptr(),
        None if v_scale is None else v_scale.data_ptr(),
        sizes,
        scale,
        softcap,
        DTYPE_CODES[dtype_name(q.dtype)],
    )
    check(code, name)
