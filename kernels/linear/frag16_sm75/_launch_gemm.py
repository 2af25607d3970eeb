"""Launching the schedule `gemm` for sm_75."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm75._launch import run
from gristmill.kernels.linear.frag16_sm80.args import ARGS
from gristmill.kernels.linear.frag16_sm80.gemm import workspace_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; any number of rows in one launch."""
    run(
        lambda form: ptx_entry(f"gm_linear_{form}_gemm_sm75", ARGS, "compute_75"),
        config,
        call,
        workspace_of(config),
        aligned=True,
    )
