"""Reading the small files of a checkpoint, which may hold anything."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from gristmill.quant.errors import ConfigError

LARGEST = 64 << 20
"""Bytes of a JSON file. A configuration has some kilobytes, an index that names every expert some megabytes."""


LFS = b"version https://git-lfs"
"""How a pointer of Git LFS begins."""


def lfs_hint(path: Path) -> str:
    """What is to be said of a file that cannot be read, if it is a pointer of Git LFS, as in a clone that was made without it; else \"\"."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS)) == LFS
    except OSError:
        return ""
    return (
        "; it is a pointer of Git LFS, not the file itself: `git lfs pull` fetches that" if is_pointer else ""
    )


def read_text(path: Path, largest: int = LARGEST) -> str:
    """The text of a file; ConfigError if it cannot be read, is no regular file (reading a pipe would never end), or is too large."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"cannot read {path}: it is no regular file")
        if status.st_size > largest:
            raise ConfigError(f"{path} has more than {largest} bytes, which no such file has")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """The JSON object in a file; ConfigError as of `read_text`, or if it holds something else."""
    text = read_text(path, largest)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}{lfs_hint(path)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data
