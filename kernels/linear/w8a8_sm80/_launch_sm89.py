"""Launching linear with e4m3 activations on sm_89 and newer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.w8a8_sm80._launch import Entry, Rows, quantize_to_fp8, run
from gristmill.kernels.linear.w8a8_sm80.args import ARGS, QUANTIZE_FP8
from gristmill.kernels.linear.w8a8_sm80.shapes import FP8_BLOCK

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

ARCH = "compute_89"


def launch(config: Config, call: LinearCall) -> None:
    """`run`, with scales for each row of W, and for each row of x or all of it, or with those of blocks."""
    run(config, call, of_blocks if config["format"] == FP8_BLOCK.format else of_rows, quantize)


def of_rows() -> Entry:
    """The entry that multiplies with scales of rows."""
    return ptx_entry("gm_w8a8_linear_fp8_sm89", ARGS, ARCH)


def of_blocks() -> Entry:
    """The entry that multiplies with scales of blocks."""
    return ptx_entry("gm_w8a8_linear_fp8_block_sm89", ARGS, ARCH)


def quantize(config: Config, rows: Rows) -> None:
    """x to e4m3, in the format of the configuration."""
    quantize_to_fp8(ptx_entry("gm_quantize_fp8_sm89", QUANTIZE_FP8, ARCH), str(config["activation"]), rows)
