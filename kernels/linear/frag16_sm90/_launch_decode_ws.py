"""Launching the schedule `decode_ws`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.linear.frag16_sm90._launch import checked, copyable, run
from gristmill.kernels.linear.frag16_sm90.args import ARGS
from gristmill.kernels.native import cuda_entry

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; at most 16 rows of x."""
    product = checked(config, call)
    if product is not None:
        entry = cuda_entry(f"gm_linear_{config['format']}_decode_ws_sm90", ARGS)
        run(entry, config, copyable(product), call, None)
