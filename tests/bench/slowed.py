"""rms_norm_cpu, and the same made 8 % slower on purpose: it works on 8 % more rows."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry

OP = default_registry().op("rms_norm")
HONEST = default_registry().kernel("rms_norm", "rms_norm_cpu")
PROBLEM = OP.problem("m=100,n=2048,x=bf16")


def slower(config, x, weight, eps, out):
    """All rows, and then 8 % of them over again, into memory of its own."""
    launch = HONEST.load()
    launch(config, x, weight, eps, out)
    again = round(0.08 * len(x))
    launch(config, x[:again], weight, eps, torch.empty_like(out[:again]))


SLOWER = Kernel(
    op="rms_norm",
    name="rms_norm_slower",
    provider="test",
    language="cpp",
    target=f"{__name__}:slower",
    requires=HONEST.requires,
    config=HONEST.config,
)
