"""The environment of a measurement: device, driver, clocks, versions. It is part of every result file."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gristmill import __version__
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.target import Target

_GPU_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",
)


def environment(target: Target, command: str) -> dict[str, Any]:
    """The environment as a dict. Clocks are the current ones: call it while the device is busy, or just after."""
    build = Build.probe()
    return {
        "gristmill": __version__,
        "command": command,
        "target": target.name,
        "device": target.device,
        "python": platform.python_version(),
        "torch": build.torch,
        "triton": build.triton,
        "toolchain": build.key(),
        "packages": {name: build.version(name) for name in ("flashinfer-python", "humming-kernels")},
        "gpu": gpu_state() if target.vendor == "nvidia" else None,
        "cpu": cpu_state(),
    }


def cpu_state() -> dict[str, Any]:
    """Cores, how many this process may use and which it is pinned to (None: all), the quota of its group in cores, NUMA
    nodes, torch's threads if torch is loaded, the frequency governor, the load."""
    usable_cores = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    )
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    torch = sys.modules.get("torch")
    nodes = [*Path("/sys/devices/system/node").glob("node[0-9]*")]
    return {
        "cores": os.cpu_count(),
        "usable": len(usable_cores),
        "pinned": _ranges(usable_cores) if len(usable_cores) < (os.cpu_count() or 1) else None,
        "quota": _quota(),
        "numa_nodes": len(nodes) or None,
        "threads": torch.get_num_threads() if torch else None,
        "governor": governor.read_text().strip() if governor.is_file() else None,
        "load": round(os.getloadavg()[0], 2),
    }


def _ranges(cores: list[int]) -> str:
    """``0-3,8`` of [0, 1, 2, 3, 8]."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _quota() -> float | None:
    """The CPU quota of this process's cgroup in cores; None without a limit."""
    path = Path("/sys/fs/cgroup/cpu.max")
    parts = path.read_text().split() if path.is_file() else []
    return round(int(parts[0]) / int(parts[1]), 2) if len(parts) == 2 and parts[0] != "max" else None


def gpu_state() -> dict[str, str] | None:
    """Name, driver, clocks (MHz), power (W), temperature (C) and the bits of the reasons for reduced clocks (0x4 power, 0x8
    hardware, 0x20 and 0x40 heat) of the first GPU; None without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = subprocess.run(
        [tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    values = query.stdout.strip().splitlines()[:1]
    return dict(zip(_GPU_FIELDS, (v.strip() for v in values[0].split(",")), strict=False)) if values else None
