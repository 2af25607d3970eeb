"""RMSNorm of transformers' models by our kernel, module by module.

transformers' own mapping of layers to kernels needs the package ``kernels`` in a version that changes with every release of
transformers; this needs neither. A module is taken where it computes what `ops.rms_norm` does, which is tried on a few rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gristmill import ops
from gristmill.integrations.transformers.plans import plan_of


def use_norms(model: Any, on: bool = True) -> dict[str, str]:
    """Run the RMSNorm modules of a model by `ops.rms_norm`, with their own parameters; on=False puts their own code back.

    Returns:
        Name of each module whose class is called RMSNorm -> "gristmill", or the reason why it runs its own code.
    """
    report = {}
    for name, module in model.named_modules():
        if "RMSNorm" not in type(module).__name__:
            continue
        vars(module).pop("forward", None)
        reason = _why_not(module) if on else "switched off"
        if reason is None:
            module.forward = partial(_forward, module)
        report[name] = reason or "gristmill"
    return report


def _forward(module: Any, hidden_states: Tensor) -> Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    given = (rows, module.weight.detach(), module.variance_epsilon)
    return ops.rms_norm(*given, plan=plan_of("rms_norm", (rows,), (), given)).view(hidden_states.shape)


@torch.no_grad()
def _why_not(module: Any) -> str | None:
    """None, or the reason why a module is not ours to run."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return "it has no weight of one dimension, or no variance_epsilon"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, weight.shape[0], generator=generator, dtype=torch.float32)
    x = (rows * torch.tensor([[1e-3], [1.0], [30.0]], dtype=torch.float32)).to(weight)
    theirs, ours = module(x), _forward(module, x)
    worst = float((theirs.float() - ours.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-30))
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[weight.dtype]
    if theirs.dtype != ours.dtype or not worst <= limit:
        return f"it computes something else: {worst:.1e} away from RMSNorm"
    return None
