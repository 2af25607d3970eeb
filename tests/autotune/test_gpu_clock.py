"""The clock of a GPU, read through a stub library that answers as NVML's header specifies."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.autotune.gpu_clock import sm_clock

UUID, HANDLE = "7c9e6679-7425-40de-944b-e07fc1f90ae7", 0x7F00_1234_5678_9ABC
NOT_FOUND, UNKNOWN = 6, 999
"""Error codes of NVML; 0 is success."""


class Library:
    """The functions of libnvidia-ml.so.1 that are called, with the names and signatures of nvml.h (and of
    nvidia-ml-py 13.615), and no others."""

    __slots__ = ("clocks", "fails")

    def __init__(self) -> None:
        self.clocks, self.fails = {0: 1500, 1: 1980, 2: 2619, 3: 1700}, ""  # graphics, SM, memory, video

    def nvmlInit_v2(self) -> int:
        return UNKNOWN if self.fails == "init" else 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        assert isinstance(device._obj, ctypes.c_void_p)
        if uuid != f"GPU-{UUID}".encode():
            return NOT_FOUND
        device._obj.value = HANDLE
        return 0

    def nvmlDeviceGetClockInfo(self, device: Any, kind: Any, clock: Any) -> int:
        # A pointer: as a plain int it would lose its upper half.
        assert isinstance(device, ctypes.c_void_p) and device.value == HANDLE
        assert isinstance(kind, ctypes.c_uint) and isinstance(clock._obj, ctypes.c_uint)
        if self.fails == "clock":
            return UNKNOWN
        clock._obj.value = self.clocks[kind.value]
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    loaded = Library()

    def opened(name: str) -> Library:
        assert name == "libnvidia-ml.so.1"
        return loaded

    monkeypatch.setattr(ctypes, "CDLL", opened)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    return loaded


def test_the_clock_of_the_multiprocessors_is_read_anew_each_time(library: Library) -> None:
    read = sm_clock("cuda:0")
    assert read is not None and read() == 1980.0
    library.clocks[1] = 1200
    assert read() == 1200.0
    library.fails = "clock"
    assert read() is None


def test_a_device_that_the_library_does_not_know_has_no_clock(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.fails = "init"
    assert sm_clock("cuda:0") is None
    library.fails = ""
    # A partition of a GPU; torch without UUIDs.
    for properties in (
        SimpleNamespace(uuid="another"),
        SimpleNamespace(),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert sm_clock("cuda:0") is None


def test_without_the_library_there_is_no_clock(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert sm_clock("cuda:0") is None
