"""Launching grouped_linear over frag16 tiles on sm_75 and newer: argument checks and the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm75.weights import stored
from gristmill.kernels.moe.grouped_linear.frag16_sm80.args import ARGS
from gristmill.kernels.native import check

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K], or rows that a permutation gathers, and the three tensors of a frag16 layout -> out [P, N or N / 2].

    Raises:
        ValueError: tensors that do not fit the configuration; rows of x that do not start at multiples of 16 bytes.
        RuntimeError: no driver, one that does not take the PTX, or another error of the driver.
    """
    x, (tiles, second, perm) = call.x, call.weight
    form, what = stored(str(config["format"]), second), f"grouped_linear of {config['format']}"
    experts, k = call.expert_offsets.shape[0] - 1, x.shape[1]
    rows, n = call.out.shape[0], call.out.shape[1] * (2 if call.silu_mul else 1)
    size = experts * cdiv(n, 16) * cdiv(k, 128) * form.tile_bytes
    need(
        tiles.numel() == size,
        f"{what}: {experts} experts of [{n}, {k}] have {size} bytes of tiles, not {tiles.numel()}",
    )
    need(not perm.numel(), f"{what}: takes no weights with act-order")
    need(
        second.numel() in (0, experts * n),
        f"{what}: expected {experts * n} row multipliers, got {second.numel()}",
    )
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    need(
        aligned,
        f"{what}: rows of x must be contiguous and start at multiples of 16 bytes, got strides {x.stride()}",
    )
    if rows == 0:
        return
    args = ARGS.new(
        x.get_device(),
        stream=torch.cuda.current_stream(x.device).cuda_stream,
        y=call.out.data_ptr(),
        x=x.data_ptr(),
        ldx=x.stride(0),
        w=tiles.data_ptr(),
        offsets=call.expert_offsets.data_ptr(),
        rows=rows,
        x_rows=x.shape[0],
        experts=experts,
        n=n,
        k=k,
        top_k=call.top_k,
        silu_mul=call.silu_mul,
        clamp=call.clamp,
        alpha=call.alpha,
        limit=call.limit,
        x_type=DTYPE_CODES[dtype_name(x.dtype)],
        **{name: int(config[name]) for name in ("mt", "warps", "grid")},
    )
    for name, tensor in (("bias", call.bias), ("permutation", call.permutation)):
        if tensor is not None:
            setattr(args, name, tensor.data_ptr())
    if second.numel():
        args.row_scale = second.data_ptr()
    elif second.dtype != torch.float32:
        args.scale_type = DTYPE_CODES[dtype_name(second.dtype)]
    check(ptx_entry(f"gm_grouped_linear_{form.name}_sm75", ARGS, "compute_75")(args), what)
