"""Bytes that a process may still allocate on a CPU: files that the system keeps in memory count as free, a control group limits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.autotune import device


def version_2(root: Path, most: str, used: int, files: int) -> None:
    (root / "memory.max").write_text(most + "\n")
    (root / "memory.current").write_text(f"{used}\n")
    (root / "memory.stat").write_text(f"anon 7\ninactive_file {files}\nactive_file 9\n")


def version_1(root: Path, most: int, used: int, files: int) -> None:
    folder = root / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{most}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {files}\n")


def test_a_control_group(tmp_path: Path) -> None:
    assert device._group(tmp_path) is None
    version_2(tmp_path, "max", 500, 100)
    assert device._group(tmp_path) is None
    version_2(tmp_path, "1000", 500, 100)
    assert device._group(tmp_path) == (600, 1000)


def test_a_control_group_of_version_1(tmp_path: Path) -> None:
    version_1(tmp_path, 1000, 500, 100)
    assert device._group(tmp_path) == (600, 1000)


@pytest.mark.parametrize(
    "group,expected", [(None, (700, 1 << 20)), ((600, 1000), (600, 1000)), ((800, 1 << 60), (700, 1 << 20))]
)
def test_the_smaller_of_both(
    group: tuple[int, int] | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_available", lambda: 700)
    monkeypatch.setattr(device, "_group", lambda: group)
    monkeypatch.setattr(device.os, "sysconf", {"SC_PHYS_PAGES": 256, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert device.cpu_memory() == expected
    assert device.free_bytes("cpu") == expected[0]


def test_this_machine() -> None:
    free, total = device.cpu_memory()
    assert 0 < free < total
