"""The records behind the grades of proof, from the files that are the evidence: kernel_registry/grades.json.

elsewhere    proof reports (`kernelbench prove`), for the code that they ran; on CPU levels that CI's processors have, the tests
newer        proof reports of kernels that are PTX alone: it is the same PTX that the driver compiles for older GPUs
failed       proof reports: what was wrong there, with the code that it still has
interpreted  tests that execute the source of a kernel, or its PTX, on a CPU
compiled     the baseline of the compile matrix, with the most bytes per thread that a case of a kernel spills; the baseline of the
             library's PTX (tests/kernels/test_ptx_targets.py); the tests of machine code of HIP kernels

Every record is of the kernel's present code, by its hash, and names code levels (`gristmill.kernel_registry.grades`). Tests and baseline are
those of the same commit, which CI runs. Result files of `kernelbench bench` and `Kernel.proven` name no hash, and give no grade.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gristmill.bench import proofs
from gristmill.kernel_registry.grades import FAILED, GRADES, level_of
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import Registry, default_registry
from gristmill.kernel_registry.target import Target, known_targets, runs_code_of

sys.path.insert(0, str(Path(__file__).parent))
import repository  # noqa: E402

ROOT = repository.ROOT
RESULTS = ROOT / "bench" / "results"
PROOFS = RESULTS / "proofs"
BASELINE = ROOT / "ci" / "compile_baseline.json"
PTX_BASELINE = ROOT / "ci" / "ptx_baseline.json"
EVERY_KERNEL = "tests/kernels/test_registry_kernels.py"
TESTED_LEVELS = {"cpp": ("cpu:base", "cpu:avx2"), "python": ("cpu:avx2",)}
"""Language -> the CPU levels on which CI runs every example (`EVERY_KERNEL`, which fails where it does not run on them). C++ is run at each level
of the processor; torch chooses its own code, so only the level of the whole processor counts."""
EXECUTED = {
    "grouped_linear_block_scaled_cutedsl_sm100": "tests/integrations/cutedsl/test_experts_ptx.py",
    "grouped_linear_cutedsl_sm100": "tests/integrations/cutedsl/test_dense_experts_ptx.py",
    "linear_block_scaled_cutedsl_sm100": "tests/integrations/cutedsl/test_block_scaled_ptx.py",
    "linear_cutedsl_sm100": "tests/integrations/cutedsl/test_linear_sm100_ptx.py",
    "linear_fp8_cutedsl_sm100": "tests/integrations/cutedsl/test_linear_sm100_ptx.py",
    "moe_block_scaled_cutedsl_sm100": "tests/integrations/cutedsl/test_experts_ptx.py",
    "moe_cutedsl_sm100": "tests/integrations/cutedsl/test_dense_experts_ptx.py",
}
"""Kernel in CuTe DSL -> the test that executes its PTX on a CPU (`make hosts`)."""
FIBERS, MACHINE_CODE = "tests/native/test_hip_fibers.py", "tests/native/test_hip_isa.py"

CHAINS = {
    "all_reduce_add_rms_norm_ordered_triton": ("fused_add_rms_norm_triton",),
    "all_reduce_add_rms_norm_triton": ("fused_add_rms_norm_triton",),
    "moe_block_scaled_cutedsl_sm100": (
        "permute_triton",
        "grouped_linear_block_scaled_cutedsl_sm100",
        "combine_triton",
    ),
    "moe_mx_triton": ("permute_triton", "grouped_linear_mx_triton", "combine_triton"),
    "moe_nvfp4_triton": ("permute_triton", "grouped_linear_nvfp4_triton", "combine_triton"),
    "moe_chain_triton": ("permute_triton", "grouped_linear_triton", "combine_triton", "activation_triton"),
    "moe_chain_w_triton": (
        "permute_triton",
        "grouped_linear_w_triton",
        "combine_triton",
        "activation_triton",
    ),
    "moe_chain_invariant_triton": (
        "permute_triton",
        "grouped_linear_triton",
        "combine_triton",
        "activation_triton",
    ),
    "moe_chain_w_invariant_triton": (
        "permute_triton",
        "grouped_linear_w_triton",
        "combine_triton",
        "activation_triton",
    ),
    "moe_cutedsl_sm100": ("permute_triton", "grouped_linear_cutedsl_sm100", "combine_triton"),
    "moe_cutedsl_sm90": ("permute_triton", "grouped_linear_cutedsl_sm90", "combine_triton"),
    "moe_fp4_sm120": ("permute_triton", "moe_fp4_sm120", "combine_triton"),
    "moe_mxfp8_sm120": ("permute_triton", "moe_mxfp8_sm120", "combine_triton"),
    "moe_sm75": ("permute_triton", "grouped_linear_sm75", "combine_triton"),
    "moe_sm80": ("permute_triton", "grouped_linear_sm80", "combine_triton"),
    "moe_w8a8_triton": (
        "permute_triton",
        "grouped_linear_w8a8_triton",
        "combine_triton",
        "activation_triton",
    ),
    "paged_attention_sm80_more_split": ("paged_attention_sm80_more_split", "paged_attention_triton_split"),
    "paged_attention_sm80_split": ("paged_attention_sm80_split", "paged_attention_triton_split"),
    "route_triton": ("grouped_topk_triton", "permute_triton"),
}
"""Kernels that launch other kernels: the names of those that are compiled."""


@cache
def ptx() -> dict[str, dict[str, Any]]:
    """Kernel -> its entry in the baseline of PTX: the source, the targets that it is assembled for (`on`), the test that executes its schedule on
    a CPU (`executed`), and bytes per thread that it spills by target."""
    table: dict[str, dict[str, Any]] = json.loads(PTX_BASELINE.read_text(encoding="utf-8"))
    return table


@cache
def baseline() -> dict[tuple[str, str], tuple[bool, int]]:
    """(kernel, target) -> whether all of its cases compile, and the most bytes per thread that one spills, by the compile matrix and by the
    baseline of PTX."""
    found = {
        (name, arch): (True, entry.get("spills", {}).get(arch, 0))
        for name, entry in ptx().items()
        for arch in entry["on"]
    }
    for key, entry in json.loads(BASELINE.read_text(encoding="utf-8")).items():
        case, _, target = key.partition("@")
        pair = case.partition("/")[0], target
        good, spills = found.get(pair, (True, 0))
        found[pair] = good and "cannot" not in entry, max(spills, entry.get("spills", 0))
    return found


def parts(kernel: str) -> tuple[str, ...]:
    """The kernels that have the code of a kernel: itself, or what a chain launches."""
    return CHAINS.get(kernel, (kernel,))


@cache
def compiled() -> dict[str, frozenset[str]]:
    """Kernel -> targets for which all of its cases compile, by the baseline of the compile matrix."""
    targets = {target for _, target in baseline()}
    return {
        kernel: frozenset(
            t for t in targets if all(baseline().get((p, t), (False, 0))[0] for p in parts(kernel))
        )
        for kernel in {kernel for kernel, _ in baseline()} | CHAINS.keys()
    }


def spilled(kernel: str, target: str) -> int:
    """The most bytes per thread that a case of a kernel spills on a target."""
    return max(baseline().get((part, target), (False, 0))[1] for part in parts(kernel))


@cache
def reported() -> dict[str, dict[str, str]]:
    """Kernel -> "target: device" -> the last report (`kernelbench bench --results`) in which it matched the reference and was timed, with the
    code of that day."""
    devices_of: dict[str, dict[str, str]] = {}
    for path in sorted(RESULTS.glob("*/operations/*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        where = f"{report['environment']['target']}: {report['environment']['device']}"
        for row in report["rows"]:
            if row["us"] is not None:
                devices_of.setdefault(row["kernel"], {})[where] = str(path.relative_to(ROOT))
    return devices_of


@dataclass(frozen=True)
class Judged:
    """What a proof report says of a kernel with its present code: `state` of `proofs.STATES`, on `target`, a `device`."""

    state: str
    kernel: str
    target: Target
    device: str
    record: str


@cache
def _judged() -> tuple[Judged, ...]:
    """What all proof reports say."""
    found = []
    for path in sorted(PROOFS.glob("*.json")):
        data = proofs.read(path)
        target, device = Target.parse(data["environment"]["target"]), data["environment"]["device"]
        record = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for kernel, finding in proofs.judged(data, default_registry()).items():
            found.append(Judged(finding.state, kernel, target, device, record))
    return tuple(found)


def proved() -> dict[str, list[str]]:
    """Kernel -> "target: device" of the proof reports in which it matched the reference with its present code."""
    found: dict[str, list[str]] = {}
    for one in _judged():
        if one.state == "proven":
            found.setdefault(one.kernel, []).append(f"{one.target.name}: {one.device}")
    return found


def tested(kernel: Kernel) -> tuple[str, ...]:
    """The CPU levels on which the tests run a kernel."""
    levels = TESTED_LEVELS["cpp"] if kernel.language == "cpp" else ()
    levels = TESTED_LEVELS["python"] if kernel.provider == "torch" else levels
    return tuple(level for level in levels if not kernel.requires.check_hardware(Target.parse(level)))


def older(kernel: Kernel, target: Target) -> tuple[str, ...]:
    """The architectures before that of `target` for which the driver compiles the PTX that a kernel is on it.

    None of a kernel that also launches Triton's kernels, whose code differs by architecture.
    """
    kind, _, code = kernel.requires.code.partition(":")
    if target.vendor != "nvidia" or kind != "cuda" or not code.startswith("compute_"):
        return ()
    if any(name == "triton" for name, _ in kernel.requires.packages):
        return ()
    before = [Target.parse(name) for name in known_targets()]
    before = before[: [t.arch for t in before].index(target.arch)]
    return tuple(
        t.arch
        for t in before
        if t.vendor == "nvidia" and runs_code_of(t, code) and not kernel.requires.check_hardware(t)
    )


@dataclass(frozen=True)
class Evidence:
    """A record of a kernel: what `grades.Proof` has, for several levels; `spills` are bytes per thread by level, without zeros."""

    grade: str
    record: str
    levels: tuple[str, ...]
    ran: str = ""
    spills: Mapping[str, int] = field(default_factory=dict)

    def entry(self, code: str) -> dict[str, object]:
        """What grades.json has of it."""
        further = {"ran": self.ran, "spills": dict(self.spills)}
        return {"code": code, "on": [*self.levels]} | {
            name: value for name, value in further.items() if value
        }


def evidence(kernel: Kernel) -> Iterator[Evidence]:
    """The records of a kernel; only of levels whose hardware it claims."""
    for one in _judged():
        if one.kernel == kernel.name and one.state == "failed":
            yield Evidence(FAILED, one.record, (level_of(one.target),))
        if one.kernel == kernel.name and one.state == "proven":
            yield Evidence("elsewhere", one.record, (level_of(one.target),))
            code = kernel.requires.code.partition(":")[2]
            yield Evidence("newer", one.record, older(kernel, one.target), f"{code} on {one.target.arch}")
    yield Evidence("elsewhere", EVERY_KERNEL, tested(kernel))
    # Of any other kernel in another language, the baseline has the parts in Triton alone.
    is_ptx = any(part in ptx() for part in parts(kernel.name))
    if kernel.language in ("triton", "cutedsl") or is_ptx:
        archs = tuple(sorted(compiled().get(kernel.name, ())))
        spills = {arch: size for arch in archs if (size := spilled(kernel.name, arch))}
        executed = next(
            (p["executed"] for part in parts(kernel.name) if "executed" in (p := ptx().get(part, {}))), ""
        )
        interpreted = EXECUTED.get(kernel.name, "") if kernel.language == "cutedsl" else EVERY_KERNEL
        if record := executed if is_ptx else interpreted:
            yield Evidence("interpreted", record, archs)
        path = PTX_BASELINE if is_ptx else BASELINE
        yield Evidence("compiled", str(path.relative_to(ROOT)), archs, spills=spills)
    if kernel.language == "hip" and kernel.provider == "gristmill":
        yield Evidence("interpreted", FIBERS, kernel.requires.brings)
        yield Evidence("compiled", MACHINE_CODE, kernel.requires.brings)


def records(registry: Registry) -> str:
    """The text of grades.json: grade -> record -> kernel -> `Evidence.entry`."""
    table: dict[str, dict[str, dict[str, dict[str, object]]]] = {
        grade: {} for grade in (*GRADES, FAILED) if grade != "here"
    }
    for kernel in sorted(registry.all_kernels(), key=lambda kernel: kernel.name):
        for one in evidence(kernel):
            if one.levels:
                table[one.grade].setdefault(one.record, {})[kernel.name] = one.entry(kernel.code_hash())
    ordered = {grade: dict(sorted(of.items())) for grade, of in table.items()}
    return repository.in_lines(ordered, 3) + "\n"
