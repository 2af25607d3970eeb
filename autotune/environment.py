"""What a measurement was made on: device, driver, clocks, versions. Goes into every result file."""

from __future__ import annotations

import platform
import shutil
import subprocess
from typing import Any

from gristmill import __version__
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.target import Target

_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


def environment(target: Target, command: str) -> dict[str, Any]:
    """The table; clocks are those of this moment, so take it while the device is busy or just after."""
    build = Build.probe()
    return {
        "gristmill": __version__, "command": command, "target": target.name, "device": target.device,
        "python": platform.python_version(), "torch": build.torch, "triton": build.triton, "toolchain": build.key(),
        "packages": {name: build.version(name) for name in ("flashinfer-python", "humming-kernels")},
        "gpu": gpu_state() if target.vendor == "nvidia" else None,
    }  # fmt: skip


def gpu_state() -> dict[str, str] | None:
    """Name, driver, clocks (MHz), power (W) and temperature (C) of the first GPU; None without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    done = subprocess.run([tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"], capture_output=True,
                          text=True, check=False)  # fmt: skip
    values = done.stdout.strip().splitlines()[:1]
    return dict(zip(_GPU_FIELDS, (v.strip() for v in values[0].split(",")), strict=False)) if values else None
