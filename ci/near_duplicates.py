"""Find duplicated code: runs of LINES or more equal lines of code, without comments and blank lines.

    python ci/near_duplicates.py

Parameter lists repeat by design and are left out: the parameters of a ``def`` are the declaration of an
operation, which tests/test_types.py compares. KNOWN lists accepted pairs, each with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "kernel_registry",
    "quant",
    "kernels",
    "autotune",
    "runtime",
    "tools",
    "bench",
    "lab",
    "ci",
    "src/gristmill",
)
LINES = 12
_TILE_PRODUCT = "the call of the tile product: the arguments of a jitted function are passed one by one"
KNOWN = {
    ("kernels/linear/triton.py", "kernels/moe/grouped_linear/triton.py"): _TILE_PRODUCT,
    ("kernels/linear/triton.py", "kernels/linear/w_triton_atomic.py"): _TILE_PRODUCT,
    ("kernels/linear/w_triton_atomic.py", "kernels/moe/grouped_linear/triton.py"): _TILE_PRODUCT,
    ("kernels/sampling/_sample_triton.py", "kernels/sampling/_sample_triton.py"): (
        "two calls of the same search, over a short and a long list: a constexpr cannot be chosen at run time"
    ),
}
"""Pairs of files, each sorted, and why their duplication is accepted."""

Place = tuple[str, int]


def code(text: str) -> list[tuple[int, str]]:
    """(number, line) of the lines of code of a Python file: no docstring, comment, import, or parameter list."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            left_out.update(range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [
        (number, line)
        for number, line in lines
        if number not in left_out and any(c.isalnum() for c in line) and not line.startswith("#")
    ]


def runs(files: dict[str, str]) -> Iterator[tuple[Place, Place, int]]:
    """(place, place, lines) of every longest run of equal lines of code."""
    lines = {name: code(text) for name, text in files.items()}
    windows: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, body in lines.items():
        for at in range(len(body) - LINES + 1):
            windows[tuple(line for _, line in body[at : at + LINES])].append((name, at))
    pairs = {pair for places in windows.values() for pair in combinations(places, 2)}
    for (left, i), (right, j) in sorted(pairs):
        if ((left, i - 1), (right, j - 1)) in pairs:
            continue  # the run began earlier
        length = LINES
        while ((left, i + length - LINES + 1), (right, j + length - LINES + 1)) in pairs:
            length += 1
        yield (left, lines[left][i][0]), (right, lines[right][j][0]), length


def main() -> int:
    """Print the runs that KNOWN does not list, and its unused entries; 1 if there are any."""
    files: dict[str, str] = {}
    for folder in FOLDERS:
        paths = (ROOT / folder).glob("*.py") if folder.startswith("src/") else (ROOT / folder).rglob("*.py")
        files |= {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    wrong, unused = 0, dict(KNOWN)
    for (left, i), (right, j), length in runs(dict(sorted(files.items()))):
        unused.pop((left, right), None)
        if (left, right) not in KNOWN:
            wrong += 1
            print(f"{left}:{i} and {right}:{j}: {length} equal lines")
    for pair in unused:
        print(f"{' and '.join(pair)} no longer repeat each other: delete the entry of KNOWN")
    return 1 if wrong or unused else 0


if __name__ == "__main__":
    sys.exit(main())
