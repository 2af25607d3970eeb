"""The layout that a host's weight is packed in: one, so that a traced graph holds one call of the operator."""

from __future__ import annotations

import torch

from gristmill import ops
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.op import layout_for

DECIDING_SIZE = 16
"""The batch whose best kernel decides: the decoding of a loaded server."""


def choose_layout(op: str, problem: str, device: torch.device) -> str:
    """The name of the layout of the best verified kernel. NoKernelError: none is."""
    definition = default_registry().op(op)
    static = definition.problem(problem)
    resolved = ops.resolver(device).resolve(definition, definition.at_bucket(static, DECIDING_SIZE)).require()
    return layout_for(resolved.kernel, QuantScheme.parse(static.text("w"))).name
