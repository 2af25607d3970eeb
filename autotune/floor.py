"""The floor of a problem on a device: what reading its bytes and doing its arithmetic must cost, measured here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from gristmill.autotune.timing import measure_call
from gristmill.kernel_registry.op import Cost


@dataclass(frozen=True)
class Ceilings:
    """Measured limits. read_gbs: 1e9 bytes a second, cold. tflops: (dtype, dense matrix rate). launch_us: least call."""

    read_gbs: float
    tflops: tuple[tuple[str, float], ...]
    launch_us: float

    def floor_us(self, cost: Cost) -> float:
        """Microseconds below which no implementation of `cost` can be; a unit without a measured rate counts bytes only."""
        rate = dict(self.tflops).get(cost.unit)
        arithmetic = cost.flops / (rate * 1e6) if rate else 0.0
        return max(cost.bytes / (self.read_gbs * 1e3), arithmetic, self.launch_us)


@cache
def ceilings(device: str) -> Ceilings:
    """The ceilings of a device, measured once a process (about a second)."""
    cuda = device.startswith("cuda")
    size = (1 << 30) if cuda else (256 << 20)
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    # A sum reads everything once and writes nothing: the read ceiling, not the copy ceiling.
    read = measure_call(lambda: data.sum(), device, seconds=0.4, rounds=5)
    small = torch.ones(1, device=device)
    launch = measure_call(lambda: small.neg_(), device, seconds=0.05, rounds=5)
    rates = [(name, _matrix_rate(dtype, device)) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))]
    return Ceilings(size / min(read.samples) / 1e3, tuple(rates), launch.us if cuda else 0.0)


def _matrix_rate(dtype: torch.dtype, device: str) -> float:
    size = 8192 if device.startswith("cuda") else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = min(measure_call(lambda: torch.mm(a, b, out=out), device, seconds=0.2, rounds=5).samples)
    return 2 * size**3 / best / 1e6
