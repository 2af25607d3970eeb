"""What the programs of ci/ share: the files of the repository, git, JSON in short lines, and how a check ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINKED = (
    "kernel_registry",
    "quant",
    "kernels",
    "autotune",
    "runtime",
    "serve",
    "tools",
    "bench",
    "integrations",
)
"""The folders of the package, to which src/gristmill has links."""
PACKAGE = (*LINKED, "src/gristmill")
NATIVE = (".c", ".cpp", ".cu", ".cuh", ".h", ".hip")


def files(folders: Iterable[str], suffixes: Iterable[str] = (".py",)) -> list[Path]:
    """The files below these folders; of src/gristmill those that are no links."""
    found: list[Path] = []
    for name in folders:
        paths = (ROOT / name).glob("*") if name == "src/gristmill" else (ROOT / name).rglob("*")
        found += sorted(path for path in paths if path.suffix in suffixes)
    return found


def git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails or there is none."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def in_lines(value: Any, depth: int) -> str:
    """JSON in which each entry of the tables and lists down to `depth` begins a line."""
    if depth and isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {in_lines(entry, depth - 1)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    if depth and isinstance(value, list):
        return "[\n" + ",\n".join(in_lines(entry, depth - 1) for entry in value) + "\n]"
    return json.dumps(value)


def report(problems: Iterable[str], otherwise: str = "") -> int:
    """Print the problems, or else the other line: the exit status, 1 if there are any."""
    lines = [*problems]
    print("\n".join(lines) or otherwise, end="\n" if lines or otherwise else "")
    return 1 if lines else 0
