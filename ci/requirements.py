"""Print gristmill's requirements from pyproject.toml, one a line: ``python ci/requirements.py dev``.

The dependencies proper, and the named extras with the extras that they name in turn.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """Everything that ``pip install gristmill[extras]`` would ask for, gristmill itself left out."""
    requirements: list[str] = list(project["dependencies"])  # type: ignore[call-overload]
    optional: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    seen: set[str] = set()
    todo = list(extras)
    while todo:
        extra = todo.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in optional:
            raise SystemExit(f"unknown extra {extra!r}; expected one of {', '.join(optional)}")
        for line in optional[extra]:
            own = re.fullmatch(r"gristmill\[(.*)\]", line)
            if own:
                todo += own[1].split(",")
            elif line not in requirements:
                requirements.append(line)
    return requirements


if __name__ == "__main__":
    data = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    print("\n".join(requirements(data["project"], sys.argv[1:])))
