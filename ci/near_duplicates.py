"""Find duplicated code in Python, C++, CUDA and HIP: runs of equal tokens over at least LINES lines of code.

    python ci/near_duplicates.py

Tokens are compared, so that neither line breaks nor comments hide a copy. Runs of short lines (lists, arguments by name: fewer than
TOKENS tokens) count from MANY lines on. Left out are docstrings, imports and preprocessor lines, and in `kernels/` declarations and the
parameters of a ``def``: launchers and references take the arguments that their operation declares.
ACCEPTED lists the known ones: two files and a reason. An entry without duplicates is an error.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import combinations

import repository

GENERATED = ("kernels/_native/calls/*", "*/args.h")
LINES, MANY, TOKENS, WINDOW = 8, 12, 50, 24
ACCEPTED = {
    ("kernels/linear/triton.py", "kernels/moe/grouped_linear/triton.py"): (
        "the call of the tile product: the arguments of a jitted function are passed one by one"
    ),
    ("kernels/linear/block_scaled_triton/kernel.py", "kernels/moe/grouped_linear/block_scaled_triton.py"): (
        "the call of the tile product, for the same reason"
    ),
    ("kernels/sampling/_sample_triton.py", "kernels/sampling/_sample_triton.py"): (
        "two calls of the same search, over a short and a long list: a constexpr cannot be chosen at run time"
    ),
    ("kernels/kv_cache/qk_norm_rope_cache_triton.py", "kernels/rope/rotary_embedding_triton.py"): (
        "the configurations of one tile of heads: neither operation imports the other"
    ),
    ("kernels/linear/a8_cpu/_linear_a8_cpu.cpp", "kernels/linear/a8_cpu/_linear_a8_cpu.cpp"): (
        "one line by a tile of x: in a function of its own GCC allocates registers such that 16 rows take 2 % longer"
    ),
    ("kernels/linear/frag16_sm80/operands.cuh", "kernels/linear/frag16_sm90/decoders_wgmma.cuh"): (
        "multiplications that sm_80 lacks, replaced: as parameters there they would change the code that the records of sm_90 name"
    ),
    ("kernels/linear/frag16_sm75/gemm.cuh", "kernels/linear/frag16_sm80/gemm.cuh"): (
        "the walk over tiles and their parts, which calls the accumulation of its own class: as a parameter there it would change the code that "
        "the records of sm_80 name"
    ),
    (
        "kernels/moe/grouped_linear/frag16_sm75/grouped.cuh",
        "kernels/moe/grouped_linear/frag16_sm80/grouped.cuh",
    ): "the rows of x that a thread gathers and the walk over tiles, for the same reason",
    ("kernels/linear/block_scaled_sm120/tile.cuh", "kernels/linear/frag16_sm80/gemm_tile.cuh"): (
        "the transposition of eight rows: in a common header it would change the code that the records of sm_80 name"
    ),
    (
        "kernels/moe/grouped_linear/frag16_sm80/grouped.cuh",
        "kernels/moe/moe/block_scaled_sm120/grouped.cuh",
    ): "the columns that a lane stores, up to a row's end, which only one of them checks",
    (
        "kernels/moe/grouped_linear/frag16_sm80/args.py",
        "kernels/moe/grouped_linear/frag16_sm90/args.py",
    ): "the fields of a product of experts: each header is generated from one declaration",
    (
        "kernels/attention/paged_attention/sm80/shape.cuh",
        "kernels/attention/paged_attention/sm90/_paged_decode_copy_sm90.cuh",
    ): "the address of a row of queries: in a function of its own, nvcc multiplies strides in 64 bits",
    ("quant/formats/contract.py", "quant/formats/gguf.py"): "the parameters of Source.read",
    ("runtime/llm.py", "runtime/pooling/async_pooling.py"): (
        "the parameters of embed, score, rerank and classify, which help and type checkers show at both"
    ),
    ("integrations/sglang/quantization.py", "integrations/vllm/quantization.py"): (
        "what both hosts prescribe; neither host can import the other's classes"
    ),
}
"""Two files, in the order of the alphabet, and why their duplication is accepted."""

TOKEN = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|\w+|[^\w\s]")
COMMENT = re.compile(
    r"\"(?:\\.|[^\"\\\n])*\"|/\*.*?\*/|//[^\n]*|^[ \t]*#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE
)

Place = tuple[str, int]
Tokens = list[tuple[int, str]]


def python_code(text: str, kernels: bool) -> str:
    """A Python file without comments, docstrings and imports, and in kernels without parameters and declarations; its lines keep their numbers."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and kernels:
            left_out.update(range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.Call) and kernels and ast.unparse(node.func) in ("Kernel", "Op"):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = (re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    return "\n".join("" if number in left_out else line for number, line in enumerate(lines, 1))


def native_code(text: str) -> str:
    """A C++ file without comments and preprocessor lines; its lines keep their numbers."""
    return COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else "\n" * found[0].count("\n"), text)


def tokens(name: str, text: str) -> Tokens:
    """(line, token) of the code of a file."""
    code = python_code(text, name.startswith("kernels/")) if name.endswith(".py") else native_code(text)
    return [
        (number, token) for number, line in enumerate(code.splitlines(), 1) for token in TOKEN.findall(line)
    ]


def runs(files: dict[str, str]) -> Iterator[tuple[Place, Place, int]]:
    """(place, place, lines of code) of every longest run of equal tokens that is long enough."""
    read = {name: tokens(name, text) for name, text in files.items()}
    windows: dict[tuple[str, ...], list[Place]] = defaultdict(list)
    for name, body in read.items():
        texts = [token for _, token in body]
        for at in range(len(body) - WINDOW + 1):
            windows[tuple(texts[at : at + WINDOW])].append((name, at))
    pairs = {pair for places in windows.values() if len(places) > 1 for pair in combinations(places, 2)}
    for (left, i), (right, j) in sorted(pairs):
        if ((left, i - 1), (right, j - 1)) in pairs or (left == right and j < i + WINDOW):
            continue  # the run began earlier, or a table repeats itself
        length = WINDOW
        while ((left, i + length - WINDOW + 1), (right, j + length - WINDOW + 1)) in pairs:
            length += 1
        lines = min(
            len({line for line, _ in read[name][at : at + length]}) for name, at in ((left, i), (right, j))
        )
        if lines >= MANY or (lines >= LINES and length >= TOKENS):
            yield (left, read[left][i][0]), (right, read[right][j][0]), lines


def main() -> int:
    """Print the runs that no entry lists, and the entries that list none; 1 if there are any."""
    paths = repository.files((*repository.PACKAGE, "lab", "ci"), (".py", *repository.NATIVE))
    texts = {str(path.relative_to(repository.ROOT)): path for path in paths}
    files = {
        name: path.read_text(encoding="utf-8")
        for name, path in sorted(texts.items())
        if not any(fnmatchcase(name, pattern) for pattern in GENERATED)
    }
    found, unused = [], dict(ACCEPTED)
    for (left, i), (right, j), lines in runs(files):
        unused.pop((left, right), None)
        if (left, right) not in ACCEPTED:
            found.append(f"{left}:{i} and {right}:{j}: {lines} equal lines")
    found += [f"{' and '.join(pair)} no longer repeat each other: delete the entry" for pair in unused]
    return repository.report(found)


if __name__ == "__main__":
    gc.disable()  # trees of whole files, and hardly any garbage
    sys.exit(main())
