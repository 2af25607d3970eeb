"""Launching grouped linear over dense weights: argument checks and the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.common import dtype_name, need
from gristmill.kernels.moe.grouped_linear.dense_sm90 import shapes
from gristmill.kernels.moe.grouped_linear.dense_sm90.args import ARGS
from gristmill.kernels.native import check, cuda_entry

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K] and a dense tensor [E, N, K] -> out [P, N or N / 2]."""
    need(
        call.permutation is None,
        "grouped_linear_dense_sm90 takes rows sorted by expert, without a permutation",
    )
    product(
        config,
        call.x,
        call.weight,
        call.expert_offsets,
        call.silu_mul,
        call.out,
        call.bias,
        (call.alpha, call.limit) if call.clamp else None,
        early=False,
        clear=True,
    )


def product(
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    expert_offsets: Tensor,
    silu_mul: bool,
    out: Tensor,
    bias: Tensor | None,
    clamp: tuple[float, float] | None,
    *,
    early: bool,
    clear: bool,
) -> None:
    """One launch.

    ValueError for tensors that do not match each other or the configuration, and for rows of x that do not start at multiples of 16 bytes.

    Args:
        bias: [E, N] in x's dtype.
        clamp: alpha and limit of the clamped activation; None for silu.
        early: the launch before this one read the same offsets.
        clear: rows past the last expert's become 0.
    """
    (w,), experts = weight, expert_offsets.shape[0] - 1
    n, k = out.shape[1] * (2 if silu_mul else 1), x.shape[1]
    name = "grouped_linear of dense weights"
    need(
        tuple(w.shape) == (experts, n, k) and w.dtype == x.dtype and w.is_contiguous(),
        f"{name}: expected a contiguous {x.dtype} weight {(experts, n, k)}, got {w.dtype} {tuple(w.shape)} with strides {w.stride()}",
    )
    need(
        x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0,
        f"{name}: rows of x must be contiguous and start at multiples of 16 bytes, got strides {x.stride()}",
    )
    need(
        bias is None or tuple(bias.shape) == (experts, n) and bias.dtype == x.dtype and bias.is_contiguous(),
        f"{name}: expected a contiguous {x.dtype} bias {(experts, n)}, got {None if bias is None else tuple(bias.shape)}",
    )
    need(out.is_contiguous() and out.dtype == x.dtype, f"{name}: the result must be contiguous {x.dtype}")
    if out.shape[0] == 0:
        return
    args = ARGS.new(x.get_device())  # pointers that are not set are null
    args.stream = torch.cuda.current_stream(x.device).cuda_stream
    args.y, args.x, args.ldx, args.w = out.data_ptr(), x.data_ptr(), x.stride(0), w.data_ptr()
    if bias is not None:
        args.bias = bias.data_ptr()
    args.offsets, args.experts = expert_offsets.data_ptr(), experts
    args.rows, args.x_rows, args.n, args.k = out.shape[0], x.shape[0], n, k
    args.silu_mul = silu_mul
    if clamp is not None:
        args.clamp = 1
        args.alpha, args.limit = clamp
    args.pdl, args.early, args.clear = 1, early, clear
    for field in shapes.FIELDS:
        setattr(args, field, int(config[field]))
    code = cuda_entry(f"gm_grouped_dense_{dtype_name(x.dtype)}_sm90", ARGS)(args)
    if code:
        reason = shapes.misfit_of(config, "", k, experts)
        need(reason is None, f"{name}: {reason}")
        check(code, name)
