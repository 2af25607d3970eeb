"""Launching linear with int8 activations on sm_80 and newer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.w8a8_sm80._launch import Entry, Rows, quantize_to_int8, run
from gristmill.kernels.linear.w8a8_sm80.args import ARGS, QUANTIZE

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """`run`, with scales for each row of x and of W."""
    run(config, call, product, quantize)


def product() -> Entry:
    """The entry that multiplies."""
    return ptx_entry("gm_w8a8_linear_int8_sm80", ARGS)


def quantize(config: Config, rows: Rows) -> None:
    """x to int8, by rows."""
    quantize_to_int8(ptx_entry("gm_quantize_int8_sm80", QUANTIZE), rows)
