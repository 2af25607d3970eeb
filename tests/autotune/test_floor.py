"""Ceilings: plausible on this CPU, kept beside the store, and the floor that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gristmill.autotune import floor
from gristmill.autotune.floor import Ceilings, CeilingsError
from gristmill.kernel_registry.op import Cost

LIMITS = Ceilings(read_gbs=100.0, copy_gbs=80.0, tflops=(("bf16", 2.0),), launch_us=3.0)


@pytest.mark.parametrize(
    ("cost", "us", "bound"),
    [
        (Cost(bytes=1_000_000, flops=0), 10.0, "memory"),
        (Cost(bytes=1, flops=40_000_000), 20.0, "compute"),
        (Cost(bytes=1, flops=1), 3.0, "launch"),
        (Cost(bytes=1_000_000, flops=10**12, unit="fp4"), 10.0, "memory"),  # no rate was measured for it
    ],
)
def test_the_floor_is_the_largest_part(cost: Cost, us: float, bound: str) -> None:
    assert LIMITS.floor_us(cost) == pytest.approx(us) and LIMITS.bound(cost) == bound


def test_ceilings_are_measured_once_and_kept(policy_file, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    policy_file()
    floor.ceilings.cache_clear()
    found = floor.ceilings("cpu")
    assert 0.5 < found.read_gbs < 2000 and 0.5 < found.copy_gbs < 2000 and found.launch_us == 0.0
    assert {"fp32", "bf16"} <= dict(found.tflops).keys() and all(rate > 0.0005 for _, rate in found.tflops)
    floor.ceilings.cache_clear()
    monkeypatch.setattr(floor, "_measure", lambda device: pytest.fail("measured twice"))
    assert floor.ceilings("cpu") == found
    path = tmp_path / "cache" / "ceilings.json"
    path.write_text(path.read_text()[:-20])
    floor.ceilings.cache_clear()
    with pytest.raises(CeilingsError, match=r"ceilings.json: line \d+: .*delete it"):
        floor.ceilings("cpu")
    path.unlink()
    assert floor.kept("cpu") is None
    slowed = replace(LIMITS, throttled=("load 9",))
    monkeypatch.setattr(floor, "_measure", lambda device: slowed)
    assert floor.remeasure("cpu") == slowed and floor.ceilings("cpu") == slowed and floor.kept("cpu") == slowed
    floor.ceilings.cache_clear()
