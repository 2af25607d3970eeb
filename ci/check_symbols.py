"""Check by its symbol table that the built CPU library loads under every supported torch.

    python ci/check_symbols.py [LIBRARY]

Every undefined symbol must be libc's (of a glibc no newer than 2.34) or in ci/torch-2.11-symbols.txt, the stable C ABI
of the oldest supported torch. No C++ standard library, no Python ABI, no rpath; the only libraries needed are
libtorch_cpu and libc's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import repository

DEFAULT = repository.ROOT / "src" / "gristmill" / "_lib" / "libgristmill_cpu.so"
GLIBC_LIMIT = (2, 34)
NEEDED = re.compile(r"^(libtorch_cpu\.so|libc\.so\.6|libm\.so\.6|libgcc_s\.so\.1|ld-linux.*)$")
WEAK_BY_COMPILER = {
    "_ITM_deregisterTMCloneTable",
    "_ITM_registerTMCloneTable",
    "__cxa_finalize",
    "__gmon_start__",
}


def torch_symbols() -> set[str]:
    """The committed list."""
    lines = (repository.ROOT / "ci" / "torch-2.11-symbols.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def problems(library: Path, allowed: set[str]) -> list[str]:
    """A line for each reason why ``library`` would not load under a supported system."""
    lines = []
    for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines():
        name, _, version = line.split()[-1].partition("@")
        version = version.lstrip("@")
        if version.startswith("GLIBC_"):
            number = tuple(int(part) for part in version.removeprefix("GLIBC_").split("."))
            if number > GLIBC_LIMIT:
                lines.append(f"{name} needs {version}, newer than glibc {'.'.join(map(str, GLIBC_LIMIT))}")
        elif name not in allowed and name not in WEAK_BY_COMPILER and not version.startswith("GCC_"):
            lines.append(f"{name} is undefined and not in torch 2.11's stable C ABI")
    dynamic = _output("readelf", "-dW", str(library))
    for tag, value in re.findall(r"\((NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        if tag != "NEEDED":
            lines.append(f"{tag} {value}: the library must not carry a search path")
        elif not NEEDED.match(value):
            lines.append(f"needs {value}")
    return lines


def main() -> int:
    library = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    if not library.is_file():
        print(f"{library} does not exist; run `make build`", file=sys.stderr)
        return 2
    lines = [f"{library.name}: {line}" for line in problems(library, torch_symbols())]
    return repository.report(lines, f"{library.name}: every torch symbol is in torch 2.11's stable C ABI")


if __name__ == "__main__":
    raise SystemExit(main())
