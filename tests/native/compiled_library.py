"""C++ that tests load as a library. ccache, where it is installed, serves what another run has compiled, also in another clone."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "tests/native/on_cpu", ROOT / "kernels", ROOT / "kernels/_native")
"""What sources for GPUs include when a CPU runs them."""


def make(out: Path, *sources: Path, flags: Sequence[str], folders: Sequence[Path] = FOLDERS) -> Path:
    """Compiles sources of the repository as C++20 and links them to the library `out`; `flags` are for both steps."""
    launcher = ["ccache"] if shutil.which("ccache") else []
    # Paths below the root count relative to it, so that clones share what they compile.
    environment = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    include = [text for folder in folders for text in ("-I", str(folder))]
    command = [*launcher, "g++", "-std=c++20", "-fPIC", *flags, *include, "-x", "c++", "-c"]
    objects = [out.with_name(f"{out.stem}_{source.stem}.o") for source in sources]
    for source, made in zip(sources, objects, strict=True):
        subprocess.run([*command, str(source), "-o", str(made)], check=True, cwd=ROOT, env=environment)
    subprocess.run(["g++", "-shared", *flags, *map(str, objects), "-o", str(out)], check=True)
    return out


def load(out: Path, *sources: Path, flags: Sequence[str], folders: Sequence[Path] = FOLDERS) -> ctypes.CDLL:
    """What `make` makes, loaded."""
    return ctypes.CDLL(str(make(out, *sources, flags=flags, folders=folders)))
