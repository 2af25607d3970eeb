"""The measured ceilings of a device, and the floor of a problem: the least time for its bytes and its arithmetic.

Ceilings are measured once per device, torch version and number of threads, and kept in ``ceilings.json`` next to the store;
all roofline figures use them. `kernelbench doctor --measure` measures them again. The memory part of a row's floor does not come
from them: the bytes of the row are read in the same process and timing mode as the row (`gristmill.autotune.reading`).
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.disturbance import cpu_disturbances, gpu_disturbances, gpu_reasons_now
from gristmill.autotune.reading import Reading, reading
from gristmill.autotune.timing import Timed, list_count, measure_call
from gristmill.kernel_registry.op import Cost
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.store import target_key

SCHEMA = 1
GPU_ROUNDS, CPU_ROUNDS = 5, 25
"""Samples, of which the minimum counts; more on a CPU, where other processes disturb more of them."""
_SLOW_US = 5e5
"""Microseconds that the samples of one product take at most, unless two take longer."""


_ABSENT = re.compile(
    "not implemented|not supported|only supported|not_supported|could not run", re.IGNORECASE
)
"""Messages by which torch reports that a device has no such product: NotImplementedError, or a RuntimeError with such a message."""


class CeilingsError(ValueError):
    """A file of ceilings that cannot be read."""


@dataclass(frozen=True)
class Ceilings:
    """Measured limits.

    Attributes:
        read_gbs, copy_gbs: 1e9 bytes per second, cold; a copy counts what it reads and what it writes.
        tflops: (dtype, dense matrix rate; multiply-add = 2).
        launch_us: the minimum time of a call on the device.
        throttled: disturbances during the measurement, in words; the limits may then be too low.
    """

    read_gbs: float
    copy_gbs: float
    tflops: tuple[tuple[str, float], ...]
    launch_us: float
    throttled: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self) | {"tflops": dict(self.tflops), "throttled": [*self.throttled]}

    def floor(self, cost: Cost, read: Reading) -> Floor:
        """The floor of `cost`. The time of its bytes is that of `read`, or follows from the read bandwidth if they were too many to
        read. For a unit without a measured rate only bytes count."""
        rate, stream = dict(self.tflops).get(cost.unit), cost.bytes / (self.read_gbs * 1e3)
        has_reading = read.us is not None
        source = (
            f"read kernel of {read.size} bytes, {read.copies} in turn ({read.how})"
            if has_reading
            else f"read bandwidth for {read.size} bytes: {read.how}"
        )
        # The time of a read kernel includes the launch. If the bytes take less than the launch, the launch is the bound.
        bound = "launch" if has_reading and stream < self.launch_us else "memory"
        return max(
            Floor(read.us if read.us is not None else stream, bound, source),
            Floor(cost.flops / (rate * 1e6) if rate else 0.0, "compute", "compute"),
            # The time of a read says how short a launch can be, also where the kernel that measures launches took longer.
            Floor(0.0 if has_reading else self.launch_us, "launch", "launch"),
            key=lambda part: part.us,
        )


@dataclass(frozen=True)
class Floor:
    """The least time of a problem.

    Attributes:
        us: microseconds that no implementation can undercut.
        bound: what determines them, ``memory``, ``compute`` or ``launch``.
        source: how they were determined: a read kernel of so many bytes, a bandwidth, ``compute`` or ``launch``.
    """

    us: float
    bound: str
    source: str

    def fields(self, us: float) -> dict[str, Any]:
        """The floor fields of a row that took `us`."""
        return {
            "floor_us": self.us,
            "floor_source": self.source,
            "bound": self.bound,
            "fraction_of_floor": self.us / us,
            "note": self._below(self.us / us),
        }

    def _below(self, share: float) -> str:
        """A note on a time below this floor; "" for other times."""
        if share <= 1.0:
            return ""
        head = f"{share:.1%} of the floor: nothing is faster than its floor, so "
        if self.source.startswith("read kernel"):
            return f"{head}the {self.source} was disturbed twice, or reads slower than this kernel does"
        limit_name = {"memory": "read bandwidth"}.get(self.bound, f"{self.bound} ceiling")
        return f"{head}the measured {limit_name} was stale, disturbed or not reached by what measured it; kernelbench doctor --measure"


def row_floor(cost: Cost, device: str, us: float, *, captured: bool, hot: bool) -> Floor:
    """The floor of a row that took `us` microseconds per call, timed as a graph or eagerly, hot or cold. A size is read once per process
    and timing mode, and again for a row that was faster than its floor."""
    read = reading(
        device, cost.bytes, copies=list_count(cost.bytes, device, hot=hot), captured=captured, beaten=us
    )
    return ceilings(device).floor(cost, read)


@cache
def ceilings(device: str) -> Ceilings:
    """The ceilings of a device, from the file or measured (a few seconds) and saved."""
    return kept(device) or remeasure(device)


def kept(device: str) -> Ceilings | None:
    """The ceilings that were measured before with the same torch and threads; None if there are none."""
    policy = Policy.current()
    path, key = policy.cache_path / "ceilings.json", _key(device, policy)
    entry = _read(path).get(key)
    if entry is None:
        return None
    try:
        return Ceilings(
            float(entry["read_gbs"]),
            float(entry["copy_gbs"]),
            tuple((str(unit), float(rate)) for unit, rate in entry["tflops"]),
            float(entry["launch_us"]),
            tuple(map(str, entry.get("throttled", ()))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CeilingsError(
            f"{path}: {key}: {error!r} is not what ceilings hold; delete it to measure again"
        ) from error


def remeasure(device: str) -> Ceilings:
    """Measure the ceilings of a device and save them. If the file cannot be written, a warning is given and only this process uses them."""
    policy = Policy.current()
    path, measured = policy.cache_path / "ceilings.json", _measure(device)
    try:
        _keep(path, _key(device, policy), measured)
    except OSError as error:
        warnings.warn(
            f"cannot keep the ceilings in {path}: {error.strerror}; they are measured again each time",
            RuntimeWarning,
            stacklevel=2,
        )
    ceilings.cache_clear()
    return measured


def _key(device: str, policy: Policy) -> str:
    threads = f"|{torch.get_num_threads()} threads" if device == "cpu" else ""
    return f"{target_key(device_target(device, policy))}|torch {torch.__version__}{threads}"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise CeilingsError(
            f"{path}: line {error.lineno}: {error.msg}; delete it to measure again"
        ) from error
    except UnicodeDecodeError as error:
        raise CeilingsError(
            f"{path}: byte {error.start}: not UTF-8 text; delete it to measure again"
        ) from error
    if (
        not isinstance(data, dict)
        or data.get("schema") != SCHEMA
        or not isinstance(data.get("devices"), dict)
    ):
        raise CeilingsError(f"{path}: expected ceilings of schema {SCHEMA}; delete it to measure again")
    devices: dict[str, Any] = data["devices"]
    return devices


def _keep(path: Path, key: str, ceilings: Ceilings) -> None:
    devices = _read(path) | {key: asdict(ceilings)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(
        json.dumps({"schema": SCHEMA, "devices": devices}, indent=1) + "\n", encoding="utf-8"
    )
    os.replace(temporary, path)


def _measure(device: str) -> Ceilings:
    if device.startswith("cuda"):
        return _measure_gpu(device)
    with cpu_disturbances() as throttled:
        ceilings = _measured(device, 256 << 20, CPU_ROUNDS, ("fp32", "bf16", "int8"))
    # A CPU computes fp16 and fp8 in float32 or by emulation: torch's rate is no ceiling there. A call has no floor of its own.
    return replace(ceilings, launch_us=0.0, throttled=tuple(throttled))


def _measure_gpu(device: str) -> Ceilings:
    ceilings = _measured(device, 1 << 30, GPU_ROUNDS, tuple(_PRODUCTS))
    product = _PRODUCTS["bf16"](8192, device)
    with ThreadPoolExecutor(1) as thread:  # the driver reports throttling only while the device is busy
        reasons = thread.submit(gpu_reasons_now)
        while not reasons.done():
            for _ in range(20):
                product()
            torch.cuda.synchronize(device)
    return replace(ceilings, throttled=tuple(gpu_disturbances(reasons.result())))


def _measured(device: str, size: int, rounds: int, products: Sequence[str]) -> Ceilings:
    data = torch.ones(size // 4, dtype=torch.float32, device=device)

    def least(call: Callable[[], Any]) -> float:
        return min(measure_call(call, device, rounds=rounds).samples)

    # Sums read everything once and write nothing: the read ceiling, like STREAM's without the writes, not the copy ceiling.
    read = min(least(data.sum), least(lambda: torch.dot(data, data)))
    half, half_out = data[: size // 8], torch.empty(size // 8, device=device, dtype=torch.float32)
    # Not copy_: between equal types that is the driver's memory copy, which is slower than kernels are.
    copy = least(lambda: torch.neg(half, out=half_out))
    small = torch.ones(1, device=device, dtype=torch.float32)
    launch = least(lambda: small.neg_())
    rates = []
    for name in products:
        rate = _rate(_PRODUCTS[name], device, rounds)
        if rate is not None:
            rates.append((name, rate))
    return Ceilings(size / read / 1e3, size / copy / 1e3, tuple(rates), launch)


def _rate(make: Callable[[int, str], Callable[[], Any]], device: str, rounds: int) -> float | None:
    """1e12 operations per second of a square matrix product; None where torch has no such product for the device."""
    # On few cores a small product, which ends before it is disturbed; many cores need a large one.
    size = 8192 if device.startswith("cuda") else 512 if torch.get_num_threads() <= 4 else 2048
    try:
        call = make(size, device)
        call()
    except RuntimeError as error:
        if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)) or not _ABSENT.search(
            str(error)
        ):
            raise  # the product exists, and another error occurred
        return None
    timed = Timed(call, device)
    samples = [timed.sample()]
    # Where torch emulates a dtype, a product takes a large part of a second: disturbances are short beside it, and few rounds do.
    for _ in range(min(rounds, max(2, int(_SLOW_US / samples[0])))):
        samples.append(timed.sample())
    return 2 * size**3 / min(samples) / 1e6


def _dense(dtype: torch.dtype) -> Callable[[int, str], Callable[[], Any]]:
    def make(size: int, device: str) -> Callable[[], Any]:
        a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return make


def _int8(size: int, device: str) -> Callable[[], Any]:
    a, b = (torch.randint(-128, 127, (size, size), dtype=torch.int8, device=device) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


def _fp8(size: int, device: str) -> Callable[[], Any]:
    a, b = (
        torch.randn(size, size, device=device, dtype=torch.float32).to(torch.float8_e4m3fn) for _ in range(2)
    )
    one = torch.ones((), device=device, dtype=torch.float32)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


_PRODUCTS: dict[str, Callable[[int, str], Callable[[], Any]]] = {
    "fp32": _dense(torch.float32),
    "fp16": _dense(torch.float16),
    "bf16": _dense(torch.bfloat16),
    "int8": _int8,
    "fp8": _fp8,
}
"""By dtype: fused multiply-add (fp32), AVX512-BF16 or AMX (bf16), VNNI (int8) on a CPU; tensor cores on a GPU."""
