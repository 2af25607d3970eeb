"""docs/kernels.md, from the registry. `generate.py` writes it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.grades import FAILED, best
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import Registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.native import LEVEL_CHAINS

sys.path.insert(0, str(Path(__file__).parent))
from compile_matrix import TARGETS  # noqa: E402
from grades import proved, reported, tested  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"

COLUMNS = (*((name, name) for name in TARGETS), ("x86-64", "cpu:avx2"))
"""Heading and target of each column: the targets of the compile matrix, and the CPU that the tests run on."""

LETTERS = {
    "cuda": ("H", "CUDA C++"),
    "hip": ("W", "HIP C++"),
    "cutedsl": ("N", "CuTe DSL"),
    "triton": ("T", "Triton"),
    "cpp": ("C", "C++ for CPUs"),
    "torch": ("t", "torch"),
    "flashinfer": ("F", "FlashInfer"),
    "humming": ("U", "humming"),
    "deepgemm": ("D", "DeepGEMM"),
    "aiter": ("A", "AITER"),
    "onnxruntime": ("O", "ONNX Runtime"),
}
"""Language of our own kernels, or provider of others -> its letter in the table and its name in the legend."""

SPILLS = "ˢ"
"""Follows a letter in the table if a kernel behind it spills registers on the target."""


def letter(kernel: Kernel) -> str:
    """The letter of a kernel in the table."""
    mark, _ = LETTERS[kernel.language if kernel.provider == "gristmill" else kernel.provider]
    return mark if kernel.auto else f"({mark})"


def serves(kernel: Kernel, target: Target) -> bool:
    """Whether the kernel would run on the target with everything that it needs installed and compiled."""
    requires = kernel.requires
    build = Build.of(
        {"torch": "99", "triton": "99", "nvidia-cutlass-dsl": "99"}
        | {name: "99" for name, _ in requires.packages},
        offers=frozenset(requires.offers),
        triton_backends=("cuda", "hip", "xpu"),
        cpu_levels=tuple(LEVEL_CHAINS),
        cuda_archs=("sm_90a", "compute_80", "compute_89"),
        hip_archs=requires.brings,
    )
    return not requires.check_hardware(target) and not requires.check_build(target, build)


def runs(kernel: Kernel) -> list[str]:
    """Where the kernel has run and matched the reference, each as "target: evidence", with this or earlier code.

    Reports under bench/results; without a report of a GPU, `Kernel.proven` (device tests); for C++ and torch kernels the tests
    (tests/kernels/test_registry_kernels.py).
    """
    places = sorted(reported().get(kernel.name, ())) or ([kernel.proven] if kernel.proven else [])
    places += sorted({*proved().get(kernel.name, ())} - {*places})
    places += [f"{', '.join(levels)}: tests"] if (levels := tested(kernel)) else []
    return places


def cell(kernels: Iterable[Kernel], target: Target) -> str:
    """The letters of the kernels that claim a target and have evidence for it; bold those that ran on a device of it, marked those that spill."""
    ran: dict[str, bool] = {}
    spill: set[str] = set()
    for kernel in kernels:
        proof = best(kernel, target) if serves(kernel, target) else None
        if proof is not None and proof.grade != FAILED:
            ran[letter(kernel)] = ran.get(letter(kernel), False) or proof.grade == "elsewhere"
            spill |= {letter(kernel)} if proof.spills else set()
    order = [mark for letter, _ in LETTERS.values() for mark in (f"({letter})", letter)]
    shown = [mark for mark in order if mark in ran and (mark[0] != "(" or mark[1] not in ran)]
    return (
        " ".join((f"**{mark}**" if ran[mark] else mark) + SPILLS * (mark in spill) for mark in shown) or "-"
    )


def ops_table(registry: Registry) -> str:
    """Operations by targets, as Markdown, with its legend."""
    lines = [
        "| operation | " + " | ".join(title for title, _ in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name in sorted(registry.ops):
        kernels = registry.kernels_of(name)
        cells = [cell(kernels, Target.parse(target)) for _, target in COLUMNS]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{legend(lines[2:])}\n"


def legend(rows: Iterable[str]) -> str:
    """What the letters in the rows of the table mean."""
    used = {mark for row in rows for mark in re.findall(r"[A-Za-z]", row.partition("` |")[2])}
    names = [f"`{mark}` {name}" for mark, name in LETTERS.values() if mark in used]
    return (
        f"{', '.join(names)}. **Bold**: the present code ran on a device of that target and matched the reference (on x86-64: in the tests). "
        f"Not bold: compiled for the target, not run there; what else was done is its grade. `{SPILLS}`: of its cases in the compile matrix, "
        "some keep registers in memory on that target. In brackets: only when a policy pins it. "
        "Kernels of libraries need the library installed. No letter, no record of the present code; targets without a column "
        "have none. What each kernel needs, promises, and where it has run: below."
    )


def needs(requires: Requirement) -> str:
    """The requirements of a kernel, in words."""
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
    code = {
        "triton": "Triton for the device",
        "cpp": "C++ compiled for the CPU",
        "cuda": "CUDA code",
        "hip": "HIP code",
        "cutedsl": "CuTe DSL",
        "torch": "torch",
    }.get(kind)
    if code:
        parts.append(code + (f" ({arch})" if arch else ""))
    parts += [
        f"PTX of {arch}" if arch.startswith("compute") else f"code for {arch}" for arch in requires.loads
    ]
    return "; ".join(parts)


def promises(kernel: Kernel) -> str:
    """The guarantees of a kernel, in words."""
    notes = {
        "deterministic": kernel.deterministic,
        "batch invariant": kernel.batch_invariant,
        "dequantizes the weight in each call": kernel.dequantizes,
        "runs only when pinned": not kernel.auto,
    }
    return ", ".join(note for note, holds in notes.items() if holds) or "-"


def op_section(registry: Registry, op: Op) -> str:
    """One operation: its description and its kernels."""
    axes = ", ".join(f"`{a.name}`" + (" (changes per call)" if a.dynamic else "") for a in op.axes)
    lines = [f"## {op.name}", "", f"{op.summary[0].upper()}{op.summary[1:]}.", ""]
    lines += [f"`{op.name}({op.schema}) -> {', '.join(op.outputs) or 'in place'}`", ""]
    lines += [f"Problem: {axes}; for example `{op.bench[0]}`.", ""]
    lines += [
        "| kernel | by | language | how | needs | layouts | promises | rank | has run on |",
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
            ", ".join(runs(k)) or "-",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page(registry: Registry) -> str:
    """docs/kernels.md."""
    head = (
        "# Operations and kernels\n\n"
        "Written by `python ci/generate.py` from the registry; do not edit. *Rank* counts before anything was measured: then\n"
        "measured time decides, among kernels that have matched the reference on the device at hand. *Has run on* names devices\n"
        "with reports (`bench/results/*/operations/*.json`, `bench/results/proofs/*.json`), or whose device tests passed, with the\n"
        "code of that day. The tests run every C++ kernel at each level of an x86-64 CPU, every torch kernel there, and every Triton\n"
        f"kernel in the interpreter; the compile matrix (`ci/compile_baseline.json`) compiles every Triton kernel for {len(TARGETS)} targets.\n"
        "The letters, and `kernelbench list --target T`, go by [grades of proof](selection.md#grades-of-proof), which need a record of\n"
        "the present code on that very architecture or CPU level.\n"
    )
    return "\n".join(
        [head, ops_table(registry), *(op_section(registry, registry.op(n)) for n in sorted(registry.ops))]
    )
