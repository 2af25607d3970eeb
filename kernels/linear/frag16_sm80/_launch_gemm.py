"""Launching the schedule `gemm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.linear.frag16_sm80._launch import run
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, workspace_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; any number of rows in one launch."""
    run("gemm", config, call, workspace_of(config), COUNTER_BYTES, aligned=True)
