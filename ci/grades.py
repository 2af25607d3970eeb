"""The records behind the grades of proof, from the files that are the evidence: kernel_registry/grades.json.

elsewhere    result files (`kernelbench bench --results`); proof reports (`kernelbench prove`), for the code that they ran; device tests
             (`Kernel.proven`); on x86-64 the tests
failed       proof reports: what was wrong there, with the code that it still has
interpreted  tests that execute the source of a kernel on a CPU
compiled     the baseline of the compile matrix; the tests of machine code of HIP kernels
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gristmill.bench import proofs
from gristmill.kernel_registry.grades import FAILED, GRADES
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import Registry, default_registry
from gristmill.kernel_registry.target import Target

sys.path.insert(0, str(Path(__file__).parent))
import repository  # noqa: E402

ROOT = repository.ROOT
RESULTS = ROOT / "bench" / "results"
PROOFS = RESULTS / "proofs"
BASELINE = ROOT / "ci" / "compile_baseline.json"
EVERY_KERNEL = "tests/kernels/test_registry_kernels.py"
DEVICE_TESTS = "tests/gpu"
FIBERS, MACHINE_CODE = "tests/native/test_hip_fibers.py", "tests/native/test_hip_isa.py"

CHAINS = {
    "all_reduce_add_rms_norm_ordered_triton": ("fused_add_rms_norm_triton",),
    "all_reduce_add_rms_norm_triton": ("fused_add_rms_norm_triton",),
    "moe_chain_triton": ("permute_triton", "grouped_linear_triton", "combine_triton"),
    "moe_chain_w_triton": ("permute_triton", "grouped_linear_w_triton", "combine_triton"),
    "moe_chain_invariant_triton": ("permute_triton", "grouped_linear_triton", "combine_triton"),
    "moe_chain_w_invariant_triton": ("permute_triton", "grouped_linear_w_triton", "combine_triton"),
}
"""Kernels that launch other kernels and have no code of their own to compile."""


@cache
def compiled() -> dict[str, frozenset[str]]:
    """Kernel -> targets for which all of its cases compile, by the baseline of the compile matrix."""
    compiles: dict[tuple[str, str], bool] = {}
    for key, entry in json.loads(BASELINE.read_text(encoding="utf-8")).items():
        case, _, target = key.partition("@")
        pair = case.partition("/")[0], target
        compiles[pair] = compiles.get(pair, True) and "cannot" not in entry
    of = {
        kernel: frozenset(t for (k, t), good in compiles.items() if good and k == kernel)
        for kernel, _ in compiles
    }
    for chain, parts in CHAINS.items():
        of[chain] = frozenset.intersection(*(of.get(part, frozenset()) for part in parts))
    return of


@cache
def reported() -> dict[str, dict[str, str]]:
    """Kernel -> "target: device" -> the last report (`kernelbench bench --results`) in which it matched the reference and was timed."""
    devices_of: dict[str, dict[str, str]] = {}
    for path in sorted(RESULTS.glob("*/operations/*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        where = f"{report['environment']['target']}: {report['environment']['device']}"
        for row in report["rows"]:
            if row["us"] is not None:
                devices_of.setdefault(row["kernel"], {})[where] = str(path.relative_to(ROOT))
    return devices_of


COUNTING = {"proven": "elsewhere", "failed": FAILED}
"""What a proof report says of a kernel -> its place in the records."""


@cache
def _judged() -> tuple[tuple[str, str, str, str, str], ...]:
    """(state, kernel, "target: device", kind of device, report) of all proof reports, by the present code.

    The kind is the architecture; of a CPU its level, because other levels are other code.
    """
    found = []
    for path in sorted(PROOFS.glob("*.json")):
        data = proofs.read(path)
        target = Target.parse(data["environment"]["target"])
        where = f"{target.name}: {data['environment']['device']}"
        kind = target.base if target.vendor == "cpu" else target.arch
        record = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for kernel, finding in proofs.judged(data, default_registry()).items():
            found.append((finding.state, kernel, where, kind, record))
    return tuple(found)


def proved() -> dict[str, list[tuple[str, str]]]:
    """Kernel -> ("target: device", report) of the proof reports in which it matched the reference with its present code."""
    found: dict[str, list[tuple[str, str]]] = {}
    for state, kernel, where, _, record in _judged():
        if state == "proven":
            found.setdefault(kernel, []).append((where, record))
    return found


def tested(kernel: Kernel) -> bool:
    """Whether the tests run it on an x86-64 CPU."""
    return kernel.language == "cpp" or kernel.provider == "torch"


def evidence(kernel: Kernel) -> Iterator[tuple[str, str, str]]:
    """(grade, record, architecture) of a kernel; only of architectures whose hardware it claims."""
    places = reported().get(kernel.name, {})
    for where, record in places.items():
        yield "elsewhere", record, Target.parse(where.partition(":")[0]).arch
    if not places and ":" in kernel.proven:
        yield "elsewhere", DEVICE_TESTS, Target.parse(kernel.proven.partition(":")[0]).arch
    x86 = Target.parse("cpu:avx2")
    if tested(kernel) and not kernel.requires.check_hardware(x86):
        yield "elsewhere", EVERY_KERNEL, x86.arch
    # Of a kernel in another language, the baseline has the parts in Triton alone.
    for target in sorted(compiled().get(kernel.name, ()) if kernel.language == "triton" else ()):
        arch = Target.parse(target).arch
        yield "interpreted", EVERY_KERNEL, arch
        yield "compiled", str(BASELINE.relative_to(ROOT)), arch
    if kernel.language == "hip" and kernel.provider == "gristmill":
        for arch in kernel.requires.brings:
            yield "interpreted", FIBERS, arch
            yield "compiled", MACHINE_CODE, arch


def records(registry: Registry) -> str:
    """The text of grades.json: grade -> record -> kernel -> architectures; of proof reports with the hash of the kernel's code."""
    table: dict[str, dict[str, dict[str, list[str] | dict[str, str]]]] = {
        grade: {} for grade in (*GRADES, FAILED) if grade != "here"
    }
    by_name = {kernel.name: kernel for kernel in registry.all_kernels()}
    for name, kernel in sorted(by_name.items()):
        for grade, record, arch in evidence(kernel):
            archs = table[grade].setdefault(record, {}).setdefault(name, [])
            if isinstance(archs, list) and arch not in archs:
                archs.append(arch)
    for state, name, _, kind, record in sorted(_judged()):
        if state in COUNTING and name in by_name:
            table[COUNTING[state]].setdefault(record, {})[name] = {kind: by_name[name].code_hash()}
    ordered = {grade: dict(sorted(of.items())) for grade, of in table.items()}
    return repository.in_lines(ordered, 3) + "\n"
