"""Ceilings: plausible on this CPU, kept beside the store, and the floors computed from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gristmill.autotune import floor
from gristmill.autotune.floor import Ceilings, CeilingsError
from gristmill.autotune.reading import Reading
from gristmill.kernel_registry.op import Cost

LIMITS = Ceilings(read_gbs=100.0, copy_gbs=80.0, tflops=(("bf16", 2.0),), launch_us=3.0)


READ = Reading(size=1_000_000, copies=64, us=12.0, how="dot")


@pytest.mark.parametrize(
    ("cost", "read_us", "us", "bound", "source"),
    [
        (
            Cost(bytes=1_000_000, flops=0),
            12.0,
            12.0,
            "memory",
            "read kernel of 1000000 bytes, 64 in turn (dot)",
        ),
        (Cost(bytes=1_000_000, flops=40_000_000), 12.0, 20.0, "compute", "compute"),
        (Cost(bytes=1, flops=1), 2.0, 2.0, "launch", "read kernel of 1 bytes, 64 in turn (dot)"),
        (Cost(bytes=1, flops=1), 3.5, 3.5, "launch", "read kernel of 1 bytes, 64 in turn (dot)"),
        (
            Cost(bytes=1_000_000, flops=10**12, unit="fp4"),
            12.0,
            12.0,
            "memory",
            "read kernel of 1000000 bytes, 64 in turn (dot)",
        ),  # no rate
        (Cost(bytes=1_000_000, flops=0), None, 10.0, "memory", "read bandwidth for 1000000 bytes: no room"),
    ],
)
def test_the_floor_is_the_largest_part(
    cost: Cost, read_us: float | None, us: float, bound: str, source: str
) -> None:
    read = replace(READ, size=cost.bytes, us=read_us, how=READ.how if read_us else "no room")
    actual = LIMITS.floor(cost, read)
    assert (actual.us, actual.bound, actual.source) == (pytest.approx(us), bound, source)


def test_a_row_below_its_floor_says_which_measurement_to_doubt() -> None:
    slow, compute = Cost(bytes=1_000_000, flops=0), Cost(bytes=1_000_000, flops=10**9)
    for cost, read, doubted in (
        (slow, READ, "the read kernel of 1000000 bytes, 64 in turn (dot) was disturbed twice"),
        (slow, replace(READ, us=None), "the measured read bandwidth was stale"),
        (compute, READ, "the measured compute ceiling was stale"),
    ):
        limit = LIMITS.floor(cost, read)
        below, above = limit.fields(limit.us / 1.05), limit.fields(limit.us)
        assert below["note"].startswith("105.0% of the floor") and doubted in below["note"]
        assert ("doctor --measure" in below["note"]) == ("read kernel" not in limit.source)
        assert above["note"] == "" and above["fraction_of_floor"] == 1.0 and above["floor_us"] == limit.us


def test_a_rows_bytes_are_read_as_the_row_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(floor, "ceilings", lambda device: LIMITS)
    monkeypatch.setattr(
        floor, "reading", lambda device, size, **how: calls.append((device, size, how)) or READ
    )
    for hot in (False, True):
        floor.row_floor(Cost(bytes=1 << 20, flops=0), "cpu", 7.0, captured=False, hot=hot)
    floor.row_floor(Cost(bytes=1 << 20, flops=0), "cuda:0", 7.0, captured=True, hot=False)
    floor.row_floor(Cost(bytes=100 << 20, flops=0), "cuda:0", 7.0, captured=False, hot=False)
    assert calls == [
        ("cpu", 1 << 20, {"copies": 64, "captured": False, "beaten": 7.0}),
        ("cpu", 1 << 20, {"copies": 1, "captured": False, "beaten": 7.0}),
        ("cuda:0", 1 << 20, {"copies": 64, "captured": True, "beaten": 7.0}),
        ("cuda:0", 100 << 20, {"copies": 3, "captured": False, "beaten": 7.0}),
    ]


def test_ceilings_are_measured_once_and_kept(policy_file, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    policy_file()
    floor.ceilings.cache_clear()
    actual = floor.ceilings("cpu")
    assert 0.5 < actual.read_gbs < 2000 and 0.5 < actual.copy_gbs < 2000 and actual.launch_us == 0.0
    assert {"fp32", "bf16"} <= dict(actual.tflops).keys() and all(rate > 0.0005 for _, rate in actual.tflops)
    floor.ceilings.cache_clear()
    monkeypatch.setattr(floor, "_measure", lambda device: pytest.fail("measured twice"))
    assert floor.ceilings("cpu") == actual
    path = tmp_path / "cache" / "ceilings.json"
    path.write_text(path.read_text()[:-20])
    floor.ceilings.cache_clear()
    with pytest.raises(CeilingsError, match=r"ceilings.json: line \d+: .*delete it"):
        floor.ceilings("cpu")
    path.unlink()
    assert floor.kept("cpu") is None
    slowed = replace(LIMITS, throttled=("load 9",))
    monkeypatch.setattr(floor, "_measure", lambda device: slowed)
    assert (
        floor.remeasure("cpu") == slowed and floor.ceilings("cpu") == slowed and floor.kept("cpu") == slowed
    )
    floor.ceilings.cache_clear()


def raising(error: Exception):
    def make(size: int, device: str):
        raise error

    return make


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("\"addmm_impl_cpu_\" not implemented for 'Float8_e4m3fn'"),
        NotImplementedError("Could not run 'aten::_int_mm' with arguments from the 'Meta' backend"),
        RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
    ],
)
def test_a_product_that_a_device_does_not_have_has_no_rate(error: Exception) -> None:
    assert floor._rate(raising(error), "cpu", 1) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB"),
        torch.AcceleratorError(
            "CUDA error: an illegal memory access was encountered; operation not supported"
        ),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        TypeError("randn() received an invalid combination of arguments"),
    ],
)
def test_what_else_goes_wrong_is_not_taken_for_that(error: Exception) -> None:
    with pytest.raises(type(error)):
        floor._rate(raising(error), "cpu", 1)
