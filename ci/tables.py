"""Write docs/kernels.md and the table of operations in README.md from the registry.

python ci/tables.py            write both
python ci/tables.py --check    write nothing; exit 1 if one of them is not what the registry says
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from gristmill.kernel_registry.build import Build, normal_name
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import Registry, default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- ops-table -->", "<!-- /ops-table -->"

COLUMNS = (
    ("sm_75", "sm_75"),
    ("sm_80", "sm_80"),
    ("sm_90", "sm_90"),
    ("sm_100", "sm_100"),
    ("sm_120", "sm_120"),
    ("gfx90a", "gfx90a"),
    ("gfx942", "gfx942"),
    ("gfx950", "gfx950"),
    ("gfx1030", "gfx1030"),
    ("gfx1100", "gfx1100"),
    ("gfx1201", "gfx1201"),
    ("xpu", "xpu:bmg"),
    ("x86-64", "cpu:avx2"),
    ("arm64", "cpu:neon"),
)
"""Heading and target of each column. sm_86, sm_87 and sm_89 are as sm_80; sm_103 as sm_100; sm_121 as sm_120."""

LETTERS = {
    "cuda": "H",
    "triton": "T",
    "cpp": "C",
    "torch": "t",
    "flashinfer": "F",
    "humming": "U",
    "deepgemm": "D",
    "aiter": "A",
    "onnxruntime": "O",
}
LEGEND = (
    "`H` CUDA C++, `T` Triton, `C` C++ for CPUs, `t` torch; wrapped libraries, when installed: `F` FlashInfer, "
    "`U` humming, `D` DeepGEMM, `A` AITER, `O` ONNX Runtime. In brackets: only when a policy pins it. sm_86, sm_87 and sm_89 are as sm_80, "
    "sm_103 as sm_100, sm_121 as sm_120. What a letter needs, promises, and where it has run: `docs/kernels.md`."
)


def letter(kernel: Kernel) -> str:
    """What stands for a kernel in the table."""
    if kernel.provider == "gristmill":
        mark = LETTERS.get(kernel.language, "p")
    else:
        mark = LETTERS.get(kernel.provider, kernel.provider)
    return mark if kernel.auto else f"({mark})"


def serves(kernel: Kernel, target: Target) -> bool:
    """Whether the kernel would run on the target with everything that it needs installed and compiled."""
    requires = kernel.requires
    packages = dict(EVERYTHING.packages) | {normal_name(name): "99" for name, _ in requires.packages}
    build = replace(EVERYTHING, packages=tuple(sorted(packages.items())), offers=frozenset(requires.offers))
    return not requires.check_hardware(target) and not requires.check_build(target, build)


EVERYTHING = Build.of(
    {"torch": "99", "triton": "99", "nvidia-cutlass-dsl": "99"},
    triton_backends=("cuda", "hip", "xpu"),
    cpu_levels=(
        "base",
        "avx2",
        "avx512",
        "avx512_vnni",
        "avx512_bf16",
        "amx",
        "neon",
        "neon_dotprod",
        "neon_i8mm",
        "sve",
    ),
    cuda_archs=("sm_90a",),
)
"""All that this repository's build can make, for every processor at once."""


def ops_table(registry: Registry) -> str:
    """Operations by targets, as Markdown."""
    lines = [
        "| operation | " + " | ".join(title for title, _ in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    order = [*LETTERS.values()]
    for name in sorted(registry.ops):
        cells = []
        for _, text in COLUMNS:
            target = Target.parse(text)
            marks = {letter(k) for k in registry.kernels_of(name) if serves(k, target)}
            marks -= {f"({mark})" for mark in marks}
            cells.append(" ".join(sorted(marks, key=lambda m: (order.index(m.strip("()")), m))) or "-")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{LEGEND}\n"


def needs(requires: Requirement) -> str:
    """What a kernel needs, in words."""
    parts = []
    if requires.vendors:
        parts.append(" or ".join(requires.vendors))
    if requires.features:
        parts.append(" or ".join("+".join(sorted(s)) for s in requires.features))
    if requires.brings:
        parts.append("a device that runs " + " or ".join(requires.brings))
    parts += [f"{name} {minimum}".strip() for name, minimum in requires.packages]
    parts += [f"`{offer}`" for offer in requires.offers]
    kind, _, arch = requires.code.partition(":")
    made = {
        "triton": "Triton for the device",
        "cpp": "C++ compiled for the CPU",
        "cuda": "CUDA code",
        "hip": "HIP code",
        "cute": "CuTe DSL",
        "torch": "torch",
    }.get(kind)
    if made:
        parts.append(made + (f" ({arch})" if arch else ""))
    return "; ".join(parts)


def promises(kernel: Kernel) -> str:
    """What a kernel promises, in words."""
    found = [
        name
        for name, on in (("deterministic", kernel.deterministic), ("batch invariant", kernel.batch_invariant))
        if on
    ]
    return ", ".join([*found, *([] if kernel.auto else ["runs only when pinned"])]) or "-"


@cache
def proven() -> dict[str, set[str]]:
    """Kernel -> devices on which it matched the reference and was timed: from the reports of `kernelbench bench --results`."""
    found: dict[str, set[str]] = {}
    for path in sorted(RESULTS.glob("*/operations/*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        where = f"{report['environment']['target']}: {report['environment']['device']}"
        for row in report["rows"]:
            if row["us"] is not None:
                found.setdefault(row["kernel"], set()).add(where)
    return found


def op_section(registry: Registry, op: Op) -> str:
    """One operation: what it is, and its kernels."""
    axes = ", ".join(f"`{a.name}`" + (" (changes per call)" if a.dynamic else "") for a in op.axes)
    lines = [f"## {op.name}", "", f"{op.summary[0].upper()}{op.summary[1:]}.", ""]
    lines += [f"`{op.name}({op.arguments}) -> {', '.join(op.outputs) or 'in place'}`", ""]
    lines += [f"Problem: {axes}; for example `{op.bench[0]}`.", ""]
    lines += [
        "| kernel | by | language | how | needs | layouts | promises | rank | proven on |",
        "|---" * 9 + "|",
    ]
    for k in registry.kernels_of(op.name):
        cells = (
            f"`{k.name}`",
            k.provider,
            k.language,
            k.summary,
            needs(k.requires),
            ", ".join(k.layouts) or "-",
            promises(k),
            str(k.priority),
            ", ".join(sorted(proven().get(k.name, ()))) or k.proven or "-",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page(registry: Registry) -> str:
    """docs/kernels.md."""
    head = (
        "# Operations and kernels\n\n"
        "Written by `python ci/tables.py` from the registry; do not edit. *Rank* counts before anything was measured:\n"
        "then measured time decides, among kernels that have matched the reference on the device at hand. *Proven on* names\n"
        "devices whose reports are under `bench/results/`; every Triton kernel is compiled for the targets of the compile\n"
        "matrix (`ci/compile_baseline.json`) and run in the interpreter, every C++ kernel at each level, by the tests.\n"
    )
    return "\n".join(
        [head, ops_table(registry), *(op_section(registry, registry.op(n)) for n in sorted(registry.ops))]
    )


def readme(registry: Registry, text: str) -> str:
    """README.md with a new table between its marks; the marks are put at its end when it has none."""
    if BEGIN not in text:
        text = text.rstrip("\n") + f"\n\n## Operations and targets\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"README.md has {BEGIN} but no {END} after it")
    return f"{before}{BEGIN}\n{ops_table(registry)}{END}{after}"


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a table is out of date"
    )
    checking = parser.parse_args().check
    registry = default_registry()
    stale = []
    for path, text in (
        (PAGE, page(registry)),
        (README, readme(registry, README.read_text(encoding="utf-8"))),
    ):
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not checking:
                path.write_text(text, encoding="utf-8")
    if stale:
        print(
            f"{'out of date' if checking else 'written'}: {', '.join(stale)}"
            + ("; run python ci/tables.py" if checking else "")
        )
    return 1 if stale and checking else 0


if __name__ == "__main__":
    sys.exit(main())
