"""Check what is inside the sdist and the wheels: ``python ci/check_wheel.py DIST...``.

Wheels carry the Python packages and the libraries, and no sources of C++ or CUDA; sdists carry those. Neither carries models.
Every Python file of the tree's packages, and what they read, must be in both.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import repository

RUN = (".py", ".css", ".js", ".c")
"""What Python runs, what its report page is made of, what it compiles on the spot."""
MODEL_FILES = (".safetensors", ".u16")
COMPILED = (".o", ".cubin", ".fatbin", ".ptx", ".hsaco")
"""Device code outside the libraries: what Triton or CuTe DSL compiled on some machine, which stays there."""
SIZE_LIMIT = 24 << 20
"""Bytes; a dist over this has swallowed something. A wheel with all CUDA libraries, rare sources included, has 18 MiB."""


def tracked() -> list[str]:
    """The tree's files, by git where there is git."""
    listed = repository.git(repository.ROOT, "ls-files")
    if listed is not None:
        return [name for name in listed.splitlines() if (repository.ROOT / name).exists()]
    paths = (path for folder in repository.PACKAGE for path in (repository.ROOT / folder).rglob("*"))
    return [str(path.relative_to(repository.ROOT)) for path in paths if path.is_file()]


def carried(name: str) -> bool:
    """Whether a file of the tree belongs in a wheel: what Python runs, and the tables that kernels read."""
    if name.startswith("src/gristmill/"):
        return name.endswith((".py", ".pyi", "py.typed"))
    return name.startswith(repository.LINKED) and (
        name.endswith(RUN)
        or (name.startswith("kernels/") and name.endswith(".json"))
        or name == "kernel_registry/grades.json"
    )


def problems(dist: Path) -> list[str]:
    """What is wrong with one file, a line each."""
    lines = []
    if dist.suffix == ".whl":
        names = set(zipfile.ZipFile(dist).namelist())
        expected = {f"gristmill/{name.removeprefix('src/gristmill/')}" for name in tracked() if carried(name)}
        expected |= {f"gristmill/_lib/{name}" for name in ("libgristmill_cpu.so", "manifest.json")}
        native = [name for name in names - expected if name.endswith(repository.NATIVE)]
        lines += [f"has native source {name}" for name in native]
        lines += [f"has {name} outside gristmill/" for name in names if not name.startswith("gristmill")]
        lines += [
            f"has {name}: not part of the package" for name in names if name.startswith("gristmill/lab/")
        ]
        if "-py3-none-" not in dist.name:
            lines.append("is tied to one Python, but holds nothing that is")
    else:
        with tarfile.open(dist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        native = [
            name
            for name in tracked()
            if name.startswith(repository.LINKED) and name.endswith(repository.NATIVE)
        ]
        expected = {*filter(carried, tracked()), *native}
        expected |= {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "src/gristmill/kernels"}
        generated = ("build/", "src/gristmill/_lib", ".venv")
        lines += [f"has {name}: generated" for name in names if name.startswith(generated)]
    lines += [f"has result file {name}" for name in names if "bench/results/" in name]
    lines += [f"lacks {name}" for name in sorted(expected - names)]
    models = [name for name in names if name.endswith(MODEL_FILES) or "examples/models/" in name]
    lines += [f"has model data {name}" for name in models]
    lines += [f"has compiled code {name}" for name in names if name.endswith(COMPILED)]
    if dist.stat().st_size > SIZE_LIMIT:
        lines.append(f"is {dist.stat().st_size >> 20} MiB, over {SIZE_LIMIT >> 20}")
    return lines


def main() -> int:
    failed = 0
    for dist in map(Path, sys.argv[1:]):
        lines = [f"{dist.name} {line}" for line in problems(dist)]
        size = f"{dist.stat().st_size / 1024:.0f} KiB"
        failed |= repository.report(lines, f"{dist.name}: {size}, contents as they should be")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
