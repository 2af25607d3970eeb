"""What slows a device down during a measurement: quotas, other guests of the host, heat, the power limit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill.autotune.environment import gpu_state

WORTH_SAYING = 0.01
"""The minimum share of the time for which a disturbance is reported."""

GPU_REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of the reasons for which an NVIDIA GPU reduces its clocks; idling and clocks set by the user are not disturbances."""

_CGROUP, _STAT = Path("/sys/fs/cgroup/cpu.stat"), Path("/proc/stat")


@contextmanager
def cpu_disturbances() -> Iterator[list[str]]:
    """Descriptions of CPU disturbances of this process within the context; complete when it ends."""
    reasons: list[str] = []
    before, begin = _counters(), time.perf_counter()
    yield reasons
    after, seconds = _counters(), time.perf_counter() - begin
    reasons += disturbances(before, after, seconds, os.cpu_count() or 1, os.getloadavg()[0])


def disturbances(
    before: dict[str, float], after: dict[str, float], seconds: float, cores: int, load: float
) -> list[str]:
    """Descriptions of the disturbances between two readings of the counters. Counters are in seconds, of all cores together."""
    reasons = []
    for name, description in (
        ("quota", "held by its quota (cgroup)"),
        ("steal", "taken by other guests of this host (steal)"),
    ):
        share = (
            (after.get(name, 0.0) - before.get(name, 0.0))
            / max(seconds, 1e-9)
            / (cores if name == "steal" else 1)
        )
        if share >= WORTH_SAYING:
            reasons.append(f"{share:.0%} of the time {description}")
    if load > cores + 0.5:
        reasons.append(f"load {load:.1f} on {cores} core(s): others ran too")
    return reasons


def gpu_disturbances(reasons: str | None) -> list[str]:
    """The reasons in ``clocks_event_reasons.active`` of nvidia-smi, in words; [] for None and for anything that is no number."""
    try:
        bits = int(reasons or "0", 16)
    except ValueError:
        return []
    return [name for bit, name in GPU_REASONS.items() if bits & bit]


def gpu_reasons_now() -> str | None:
    """The current bits. Takes about a second; call it while the device is busy."""
    state = gpu_state()
    return None if state is None else state.get("clocks_event_reasons.active")


def _counters() -> dict[str, float]:
    """Seconds for which this process's group was throttled, and of steal."""
    seconds_by_cause = {}
    if _CGROUP.is_file():
        fields = dict(line.split() for line in _CGROUP.read_text().splitlines() if len(line.split()) == 2)
        if "throttled_usec" in fields:
            seconds_by_cause["quota"] = int(fields["throttled_usec"]) / 1e6
    if _STAT.is_file():
        parts = _STAT.read_text().split("\n", 1)[0].split()
        if len(parts) > 8:
            seconds_by_cause["steal"] = int(parts[8]) / os.sysconf("SC_CLK_TCK")
    return seconds_by_cause
