"""Import gristmill as it is installed and run a kernel of its library: ``python -P ci/wheel_smoke.py [FOLDER]``.

FOLDER: where it must be installed. ``-P`` keeps this checkout off the path.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import gristmill
from gristmill.kernels import native
from gristmill.kernels.norm.rms_norm_cpu import ENTRY


def main(folders: list[str]) -> None:
    """Normalize two rows at the lowest level that the library has."""
    place = Path(gristmill.__file__).parent
    if folders and not place.is_relative_to(folders[0]):
        raise SystemExit(f"expected gristmill below {folders[0]}, imported it from {place}")
    levels = native.manifest()["cpu_levels"]
    x, w = torch.ones(2, 9), torch.arange(9.0)
    out = torch.empty_like(x)
    ENTRY.cpu({"level": levels[0]}, ENTRY.op.Call(x, w, 0.0, out))
    if not torch.equal(out, w.expand(2, 9)):
        raise SystemExit(f"rms_norm of ones gave {out}")
    print(
        f"wheel: gristmill {gristmill.__version__} imports and runs from {place.name}, levels {' '.join(levels)}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
