"""Launching `_linear_wv_splitk.hip`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need, need_workspace, row_stride
from gristmill.kernels.hip import check, current_stream, hip_entry
from gristmill.kernels.linear.wv_splitk_hip.args import ARGS
from gristmill.kernels.linear.wv_splitk_hip.spec import (
    COUNTERS,
    PAIRS,
    TOKENS,
    WIDTH,
    workspace_bytes,
)

if TYPE_CHECKING:
    from ctypes import Structure

    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] with at most 8 rows, the tensor of dense_v1 or the six of plain_v1 -> out [..., N or N / 2].

    Raises:
        ValueError: tensors that do not fit the configuration, more than 8 rows, or a workspace that is too small.
        RuntimeError: no HIP runtime, no code object for the device, or an error of the runtime.
    """
    x, workspace = call.x, call.workspace
    form, k = str(config["format"]), x.shape[-1]
    rows, m = call.out.shape[-1] * (2 if call.silu_mul else 1), x.numel() // x.shape[-1]
    need(m <= TOKENS, f"linear by wvSplitK: made for at most {TOKENS} rows of x, got {m}")
    if m == 0:
        return
    args = ARGS.new(x.get_device())
    codes = call.weight[0]
    width = k * codes.element_size() if form == "dense" else k * 16 // WIDTH[form]
    stored = tuple(codes.shape) == (rows, k if form == "dense" else width) and codes.is_contiguous()
    need(
        stored and width % 16 == 0 and dtype_name(x.dtype) == config["x"],
        f"linear by wvSplitK: expected {config['x']} x and {rows} contiguous rows of {form} of {k} columns, in whole 16 bytes, "
        f"got {x.dtype} and {codes.dtype} {list(codes.shape)}",
    )
    if form == "dense":
        need(
            codes.dtype == x.dtype, f"linear by wvSplitK: W must have x's dtype {x.dtype}, got {codes.dtype}"
        )
    else:
        _scales(args, config, call.weight, rows, k)
    splits, chunk = int(config["split"]), int(config["chunk"])
    args.per_split = cdiv(cdiv(k, chunk), splits)
    args.splits = cdiv(cdiv(k, chunk), args.per_split)  # none is empty
    if args.splits > 1:
        size = workspace_bytes(m, rows, splits)
        if workspace is None:
            workspace = torch.zeros(size, dtype=torch.uint8, device=x.device)
        need_workspace("linear", workspace, size, x.device)
        args.counters = workspace.data_ptr()
        args.sums = workspace.data_ptr() + COUNTERS
    args.stream = current_stream(x)
    args.arch = str(config["arch"]).encode()
    args.y, args.x, args.w, args.ldx = call.out.data_ptr(), x.data_ptr(), codes.data_ptr(), row_stride(x)
    args.bias = None if call.bias is None else call.bias.data_ptr()
    args.residual = None if call.residual is None else call.residual.data_ptr()
    args.m, args.n, args.k, args.chunk = m, rows, k, chunk
    args.tiles, args.blocks = cdiv(cdiv(rows, 2), PAIRS), int(config["blocks"])
    args.silu_mul = int(call.silu_mul)
    args.vectors = int(args.ldx % 8 == 0 and x.data_ptr() % 16 == 0)
    args.format, args.x_type = list(WIDTH).index(form), DTYPE_CODES[dtype_name(x.dtype)]
    args.lanes = int(config["lanes"])
    check(hip_entry("gm_linear_wv_splitk", ARGS)(args), "linear by wvSplitK")


def _scales(args: Structure, config: Config, weight: list[Tensor], rows: int, k: int) -> None:
    """Sets what the columns of integer weights share."""
    _, scales, zeros, _, _, perm = weight
    group = int(config["group"])
    groups = k // group if group else 1
    fits = tuple(scales.shape) == (rows, groups) and scales.is_contiguous() and not perm.numel()
    need(
        fits and (not zeros.numel() or (zeros.shape == scales.shape and zeros.dtype == torch.uint8)),
        f"linear by wvSplitK: expected scales [{rows}, {groups}], zero points as codes, and columns in order, got scales "
        f"{list(scales.shape)}, zeros {zeros.dtype} {list(zeros.shape)}"
        + (" and a permutation" if perm.numel() else ""),
    )
    args.scales, args.scale_type = scales.data_ptr(), DTYPE_CODES[dtype_name(scales.dtype)]
    args.zeros = zeros.data_ptr() if zeros.numel() else None
    args.groups, args.group_shift = groups, group.bit_length() - 1 if group else 31
