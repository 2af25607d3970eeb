"""Launching the schedule `gemm_ws`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.common import need_workspace
from gristmill.kernels.linear.frag16_sm90._launch import checked, copyable, run
from gristmill.kernels.linear.frag16_sm90.args import ARGS
from gristmill.kernels.linear.frag16_sm90.gemm_ws import FLAG_BYTES, gates, workspace_bytes
from gristmill.kernels.native import cuda_entry

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] and the three tensors of a frag16 layout -> out [..., N or N / 2]; any number of rows in one launch."""
    product = checked(config, call, gates)
    if product is not None:
        workspace = (
            _workspace(call.workspace, workspace_bytes(config), call.x.device) if config["even"] else None
        )
        entry = cuda_entry(f"gm_linear_{config['format']}_gemm_ws_sm90", ARGS)
        run(entry, config, copyable(product), call, workspace)


def _workspace(given: Tensor | None, size: int, device: torch.device) -> Tensor:
    """The caller's workspace, or fresh memory. ValueError for one that is too small or elsewhere."""
    if given is None:
        fresh = torch.empty(size, dtype=torch.uint8, device=device)
        fresh[:FLAG_BYTES].zero_()
        return fresh
    need_workspace("linear", given, size, device)
    return given
