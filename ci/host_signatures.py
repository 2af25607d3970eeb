"""Parameters of the functions of other projects that our wrappers call, in every release: tests/kernels/host_signatures.json.

    python ci/host_signatures.py FlashInfer=DIR AITER=DIR DeepGEMM=DIR

DIR is a git clone with tags. Names of parameters are read from the sources at each release tag and at the newest commit; nothing is
imported or copied. Entries of projects that are not named are kept.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import repository

OUT = repository.ROOT / "tests" / "kernels" / "host_signatures.json"
RELEASE = r"v?(\d+)\.(\d+)\.(\d+)(\.post\d+)?"
PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
LATENT = "mla.BatchMLAPagedAttentionWrapper"
METHODS = ("__init__", "plan", "run")
LATENT_FILES = ("flashinfer/mla/_core.py", "flashinfer/mla.py")


class Project(NamedTuple):
    """A project: the oldest release that is read, and by function the files in which it was defined, the newest first."""

    origin: str
    first: tuple[int, int, int]
    functions: dict[str, tuple[str, ...]]


FLASHINFER = Project(
    "https://github.com/flashinfer-ai/flashinfer",
    (0, 2, 5),
    {
        "flashinfer.norm.rmsnorm": ("flashinfer/norm/__init__.py", "flashinfer/norm.py"),
        **{f"flashinfer.{DECODE}.{method}": ("flashinfer/decode.py",) for method in METHODS},
        **{f"flashinfer.{PREFILL}.{method}": ("flashinfer/prefill.py",) for method in METHODS},
        **{f"flashinfer.{LATENT}.{method}": LATENT_FILES for method in METHODS},
    },
)
AITER = Project(
    "https://github.com/ROCm/aiter",
    (0, 1, 1),
    {
        "aiter.gemm_a8w8": ("aiter/ops/gemm_op_a8w8.py",),
        "aiter.ops.rmsnorm.rmsnorm2d_fwd": ("aiter/ops/rmsnorm.py",),
    },
)
DEEPGEMM = Project(
    "https://github.com/deepseek-ai/DeepGEMM", (2, 1, 0), {"deep_gemm.fp8_gemm_nt": ("csrc/apis/gemm.hpp",)}
)
PROJECTS = {"FlashInfer": FLASHINFER, "AITER": AITER, "DeepGEMM": DEEPGEMM}


def releases(folder: Path, first: tuple[int, int, int]) -> list[str]:
    """Release tags from `first` on, oldest first."""
    tags = (repository.git(folder, "tag") or "").split()
    matches = [match for tag in tags if (match := re.fullmatch(RELEASE, tag))]
    found = [(tuple(map(int, match.groups()[:3])), match[4] or "", match[0]) for match in matches]
    return [tag for version, _, tag in sorted(found) if version >= first]


def of_python(source: str, name: str) -> list[str] | None:
    """Parameters of the last definition of a function, or of a method as Class.method, as `signature` writes them; None without one."""
    node: Any = ast.parse(source)
    for part in name.split("."):
        kinds = ast.FunctionDef | ast.ClassDef
        node = next((n for n in reversed(node.body) if isinstance(n, kinds) and n.name == part), None)
        if node is None:
            return None
    if not isinstance(node, ast.FunctionDef):
        return None
    for argument in (a for a in ast.walk(node.args) if isinstance(a, ast.arg)):
        argument.annotation = None
    blank = ast.Name("")
    node.args.defaults = [blank for _ in node.args.defaults]
    node.args.kw_defaults = [default and blank for default in node.args.kw_defaults]
    return [name for name in ast.unparse(node.args).split(", ") if name not in ("self", "/")]


def of_pybind(source: str, name: str) -> list[str] | None:
    """The same of a function of a pybind11 module; an alias has the parameters of what it names."""
    alias = re.search(rf'm\.attr\("{name}"\) = m\.attr\("(\w+)"\)', source)
    defined = re.search(rf'm\.def\("{alias[1] if alias else name}",(.*?)\);', source, re.DOTALL)
    if defined is None:
        return None
    return [
        f"{found}=" if default else found
        for found, default in re.findall(r'py::arg\("(\w+)"\)( = )?', defined[1])
    ]


def history(folder: Path, project: Project, function: str) -> list[dict[str, Any]]:
    """A row for each release since which the parameters are others: `since`, and `parameters` (None: not there)."""
    files = project.functions[function]
    name = function.rsplit(".", 1)[1]
    if name in METHODS:
        name = ".".join(function.rsplit(".", 2)[1:])
    rows: list[dict[str, Any]] = []
    for release in (*releases(folder, project.first), "HEAD"):
        found = None
        for file in files:
            source = repository.git(folder, "show", f"{release}:{file}")
            if source is not None and found is None:
                found = of_pybind(source, name) if file.endswith(".hpp") else of_python(source, name)
        if not rows or rows[-1]["parameters"] != found:
            rows.append({"since": release, "parameters": found})
    return rows


def main(argv: list[str]) -> int:
    table = json.loads(OUT.read_text()) if OUT.exists() else {}
    for argument in argv:
        name, _, place = argument.partition("=")
        if name not in PROJECTS or not Path(place).is_dir():
            print(f"usage: {' '.join(f'{p}=DIR' for p in PROJECTS)}; got {argument}", file=sys.stderr)
            return 2
        folder, project = Path(place), PROJECTS[name]
        table[name] = {
            "origin": project.origin,
            "newest release": releases(folder, project.first)[-1],
            "commit": (repository.git(folder, "log", "-1", "--format=%H %cs") or "").strip(),
            "functions": {function: history(folder, project, function) for function in project.functions},
        }
    OUT.write_text(repository.in_lines(table, 4) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
