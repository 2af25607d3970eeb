"""Bytes as users write them."""

from __future__ import annotations

import re

from gristmill.runtime.errors import UsageError

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_bytes(text: str, where: str) -> int:
    """``4GiB``, ``512MiB`` or a number of bytes; UsageError, with `where`, for anything else."""
    found = re.fullmatch(r"(\d+)(|[KMGT]iB)", text)
    if found is None or int(found[1]) < 1:
        raise UsageError(f"{where}: expected bytes, such as 4GiB or 512MiB, got {text!r}")
    return int(found[1]) * UNITS[found[2]]
