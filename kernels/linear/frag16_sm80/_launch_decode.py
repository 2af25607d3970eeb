"""Launching the schedule `decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.linear.frag16_sm80._launch import run
from gristmill.kernels.linear.frag16_sm80.decode import COUNTER_BYTES, workspace_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; at most 16 rows of x."""
    rows = call.out.shape[-1] * (2 if call.silu_mul else 1)
    run("decode", config, call, workspace_of(rows, config), COUNTER_BYTES, aligned=False)
