"""The present SM clock of a GPU, from NVIDIA's management library (part of the driver, called through ctypes)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

SM = 1
"""NVML_CLOCK_SM."""


def sm_clock(device: str) -> Callable[[], float | None] | None:
    """A function that reads the present clock in MHz (some microseconds per call; None where it cannot); None without one.

    The device is found by its UUID, since torch and the driver may count devices differently.
    """
    if not device.startswith("cuda"):
        return None
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, mhz = ctypes.c_void_p(), ctypes.c_uint()
    if (
        uuid is None
        or library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    ):
        return None

    def read() -> float | None:
        failed = library.nvmlDeviceGetClockInfo(handle, ctypes.c_uint(SM), ctypes.byref(mhz))
        return None if failed else float(mhz.value)

    return read
