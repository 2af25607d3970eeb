"""The ceilings of a device, measured on it, and the floor of a problem: what its bytes and its arithmetic must cost there.

Measured once and kept in ``ceilings.json`` beside the store, for every device, torch and number of threads; every roofline
figure comes from there. `kernelbench doctor --measure` measures anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.timing import measure_call
from gristmill.kernel_registry.op import Cost
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.store import target_key

SCHEMA = 1


class CeilingsError(ValueError):
    """A file of ceilings that cannot be read."""


@dataclass(frozen=True)
class Ceilings:
    """Measured limits. read_gbs, copy_gbs: 1e9 bytes a second, cold; a copy counts what it reads and what it writes.
    tflops: (dtype, dense matrix rate; multiply-add = 2). launch_us: the least that a call takes on the device.
    """

    read_gbs: float
    copy_gbs: float
    tflops: tuple[tuple[str, float], ...]
    launch_us: float

    def floor_us(self, cost: Cost) -> float:
        """Microseconds below which no implementation of `cost` can be; a unit without a measured rate counts bytes only."""
        return max(self._parts(cost).values())

    def bound(self, cost: Cost) -> str:
        """What the floor consists of: ``memory``, ``compute`` or ``launch``."""
        parts = self._parts(cost)
        return max(parts, key=lambda name: parts[name])

    def _parts(self, cost: Cost) -> dict[str, float]:
        rate = dict(self.tflops).get(cost.unit)
        return {"memory": cost.bytes / (self.read_gbs * 1e3), "compute": cost.flops / (rate * 1e6) if rate else 0.0,
                "launch": self.launch_us}  # fmt: skip


@cache
def ceilings(device: str) -> Ceilings:
    """The ceilings of a device: those kept, else measured (a few seconds) and kept."""
    policy = Policy.current()
    path, key = policy.cache_path / "ceilings.json", _key(device, policy)
    kept = _read(path).get(key)
    if kept is not None:
        return Ceilings(kept["read_gbs"], kept["copy_gbs"], tuple(map(tuple, kept["tflops"])), kept["launch_us"])
    return remeasure(device)


def remeasure(device: str) -> Ceilings:
    """Measure the ceilings of a device and keep them."""
    policy = Policy.current()
    path, found = policy.cache_path / "ceilings.json", _measure(device)
    _keep(path, _key(device, policy), found)
    ceilings.cache_clear()
    return found


def _key(device: str, policy: Policy) -> str:
    threads = f"|{torch.get_num_threads()} threads" if device == "cpu" else ""
    return f"{target_key(device_target(device, policy))}|torch {torch.__version__}{threads}"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise CeilingsError(f"{path}: line {error.lineno}: {error.msg}; delete it, and it will be measured anew") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise CeilingsError(f"{path}: expected ceilings of schema {SCHEMA}; delete it, and it will be measured anew")
    kept: dict[str, Any] = data["devices"]
    return kept


def _keep(path: Path, key: str, found: Ceilings) -> None:
    devices = _read(path) | {key: asdict(found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"schema": SCHEMA, "devices": devices}, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _measure(device: str) -> Ceilings:
    cuda = device.startswith("cuda")
    size = (1 << 30) if cuda else (256 << 20)
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    # A sum reads everything once and writes nothing: the read ceiling, not the copy ceiling.
    read = min(measure_call(lambda: data.sum(), device, rounds=5).samples)
    half, other = data[: size // 8], torch.empty(size // 8, device=device)
    # Not copy_: between equal types that is the driver's memory copy, which is slower than kernels are.
    copy = min(measure_call(lambda: torch.neg(half, out=other), device, rounds=5).samples)
    small = torch.ones(1, device=device)
    launch = measure_call(lambda: small.neg_(), device, rounds=5)
    rates = []
    # A CPU computes fp16 and fp8 in float32 or by emulation: torch's rate is no ceiling there.
    for name in _PRODUCTS if cuda else ("fp32", "bf16", "int8"):
        make = _PRODUCTS[name]
        rate = _rate(make, device)
        if rate is not None:
            rates.append((name, rate))
    return Ceilings(size / read / 1e3, size / copy / 1e3, tuple(rates), launch.us if cuda else 0.0)


def _rate(make: Callable[[int, str], Callable[[], Any]], device: str) -> float | None:
    """1e12 operations a second of a square matrix product; None where torch has no such product for the device."""
    size = 8192 if device.startswith("cuda") else 1024
    try:
        call = make(size, device)
        call()
    except (RuntimeError, NotImplementedError, TypeError):  # torch's ways of saying that this device has no such product
        return None
    return 2 * size**3 / min(measure_call(call, device, rounds=5).samples) / 1e6


def _dense(dtype: torch.dtype) -> Callable[[int, str], Callable[[], Any]]:
    def make(size: int, device: str) -> Callable[[], Any]:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return make


def _int8(size: int, device: str) -> Callable[[], Any]:
    a, b = (torch.randint(-128, 127, (size, size), dtype=torch.int8, device=device) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


def _fp8(size: int, device: str) -> Callable[[], Any]:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


_PRODUCTS: dict[str, Callable[[int, str], Callable[[], Any]]] = {
    "fp32": _dense(torch.float32), "fp16": _dense(torch.float16), "bf16": _dense(torch.bfloat16), "int8": _int8, "fp8": _fp8,
}  # fmt: skip
"""By dtype: fused multiply-add (fp32), AVX512-BF16 or AMX (bf16), VNNI (int8) on a CPU; tensor cores on a GPU."""
