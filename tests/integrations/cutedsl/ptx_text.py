"""The PTX that CuTe DSL makes of a program."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gristmill.kernels.cutedsl import compile_program


def ptx_of(source: Any, arch: str) -> str:
    """source: as `compile_program` takes it."""
    with tempfile.TemporaryDirectory() as folder:
        compile_program(source, arch, "--keep-ptx", f"--dump-dir={folder}")
        (file,) = Path(folder).glob("*.ptx")
        return file.read_text(encoding="utf-8")
