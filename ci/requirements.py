"""Print gristmill's requirements from pyproject.toml, one a line: ``python ci/requirements.py dev``.

The dependencies proper, and the named extras with the extras that they name in turn.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Everything that ``pip install gristmill[extras]`` would ask for, gristmill itself left out."""
    found, todo = dict.fromkeys(project["dependencies"]), [*extras]
    optional = project["optional-dependencies"]
    for extra in todo:  # which grows meanwhile
        if extra not in optional:
            raise SystemExit(f"unknown extra {extra!r}; expected one of {', '.join(optional)}")
        for line in optional[extra]:
            own = re.fullmatch(r"gristmill\[(.*)\]", line)
            todo += [name for name in own[1].split(",") if name not in todo] if own else []
            found |= {} if own else {line: None}
    return [*found]


if __name__ == "__main__":
    data = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    print("\n".join(requirements(data["project"], sys.argv[1:])))
