"""Launching the schedule `decode`."""

from __future__ import annotations

from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.linear.frag16_sm90._launch import ARGUMENTS, checked, run
from gristmill.kernels.native import cuda_function


def launch(
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    n: int,
    workspace: Tensor | None,
    out: Tensor,
) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; at most 16 rows of x."""
    call = checked(config, x, weight, silu_mul, out)
    if call is not None:
        entry = cuda_function(f"gm_linear_{config['format']}_decode_sm90", "sm_90a", ARGUMENTS)
        run(entry, config, call, weight, bias, residual, silu_mul, None, out)
