"""The weight formats of linear on Hopper that this build contains: `make test` builds without the rare ones."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from gristmill.kernels.linear.frag16_sm90.instances import Format, formats
from gristmill.kernels.native import library_dir


def built(*schedules: str) -> list[Format]:
    """Returns the formats whose sources for all of these schedules were compiled, or all formats if nothing
    was built."""
    left_out = _left_out(library_dir() / "manifest.json")
    return [
        form
        for form in formats().values()
        if not any(f"linear_{form.name}_{schedule}_sm90" in left_out for schedule in schedules)
    ]


@cache
def _left_out(manifest: Path) -> frozenset[str]:
    if not manifest.is_file():
        return frozenset()
    return frozenset(json.loads(manifest.read_text(encoding="utf-8")).get("left_out", []))
