"""Launching the schedule `decode` for sm_75."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm75._launch import run
from gristmill.kernels.linear.frag16_sm75.decode import workspace_of
from gristmill.kernels.linear.frag16_sm80.args import ARGS

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; at most 8 rows of x."""
    size = workspace_of(call.out.shape[-1] * (2 if call.silu_mul else 1), config)
    run(
        lambda form: ptx_entry(f"gm_linear_{form}_decode_sm75", ARGS, "compute_75"),
        config,
        call,
        size,
        aligned=False,
    )
