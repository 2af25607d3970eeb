"""rms_norm_cpu, and a copy that is 8 % slower on purpose: it processes 8 % more rows."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry

OP = default_registry().op("rms_norm")
HONEST = default_registry().kernel("rms_norm", "rms_norm_cpu")
PROBLEM = OP.problem("m=100,n=2048,x=bf16")


def slower(config, call):
    """Processes all rows, and 8 % of them once more into a separate buffer."""
    launch = HONEST.load()
    launch(config, call)
    repeated = round(0.08 * len(call.x))
    launch(config, call.replace(x=call.x[:repeated], out=torch.empty_like(call.out[:repeated])))


SLOWER = Kernel(
    op="rms_norm",
    name="rms_norm_slower",
    provider="test",
    language="cpp",
    target=f"{__name__}:slower",
    requires=HONEST.requires,
    config=HONEST.config,
)
