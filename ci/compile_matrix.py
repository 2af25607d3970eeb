"""Compile the registry's kernels in Triton and CuTe DSL ahead of time for every target they claim; no GPU is needed.

    python ci/compile_matrix.py                 a sample: what changed since it was last compiled, and a rotating share,
                                                for 40 seconds at most (--seconds)
    python ci/compile_matrix.py --full          everything
    python ci/compile_matrix.py --only rms_norm --target sm_90
    python ci/compile_matrix.py --full --update write ci/compile_baseline.json

For each (kernel, case, target): registers, spilled bytes, shared memory, and the instructions that the kernel promises.
Registers or spills above the committed baseline fail; so does a pair that stops compiling, or that needs more shared
memory than the target has. A pair that cannot compile, for a known reason, is in the baseline with that reason. Each
compilation has a time-out. Kernels in CuTe DSL are left out where it is not installed; `make hosts` has it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # only as a program: an import must not change the interpreter setting
    os.environ.pop("TRITON_INTERPRET", None)

import repository

from gristmill.autotune.child import Child, serve
from gristmill.kernel_registry.kernel import Kernel, load_attribute
from gristmill.kernel_registry.policy import default_cache
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.cutedsl import CuteDslCase

TARGETS = (
    *("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
)
"""The columns of docs/kernels.md, too. A new one needs `--target T --update`, and `make generate`."""
BASELINE = Path(__file__).with_name("compile_baseline.json")
TIMEOUT = 90.0
ROTATION = 7
"""A pair that has not changed is compiled again every ROTATION days."""

PROMISES = {
    "wgmma": r"\b[HQI]GMMA",
    "mma": r"\b[HQIO]?MMA\b|\bHMMA|\bIMMA|\bQMMA|\bOMMA|GMMA|UTC\w*MMA",
    "mfma": r"v_s?mfma",
    "wmma": r"v_wmma",
    "tma": r"UTMALDG",
    "tcgen05": r"UTC\w*MMA",
    "block_scaled": r"UTC[OQ]MMA|\b[OQ]MMA\.SF|v_mfma_scale",
    "dependent_launch": r"\A(?:(?!\bLDG|\bSTG|\bRED|\bATOMG|\bUBLKCP|\bLDGSTS)[\s\S])*\bPREEXIT\b(?:(?!\bLDG|\bSTG|\bRED|\bATOMG)[\s\S])*\bACQBULK\b",
}


@dataclass(frozen=True)
class Pair:
    """One compilation."""

    kernel: Kernel
    case: str
    target: str

    @property
    def key(self) -> str:
        return f"{self.kernel.name}/{self.case}@{self.target}"

    def stamp(self, triton: str) -> str:
        """What its code and compiler are known by."""
        return f"{self.kernel.code_hash()},{triton}"

    def is_due(self, day: int) -> bool:
        """Whether it is compiled on this day even if it has not changed."""
        return int(hashlib.sha256(self.key.encode()).hexdigest(), 16) % ROTATION == day % ROTATION


def pairs(only: str | None, target: str | None) -> list[Pair]:
    """Every (kernel, case, target) that the registry's kernels in Triton and CuTe DSL claim."""
    pairs = []
    for kernel in default_registry().all_kernels():
        if kernel.aot is None or (only and only not in (kernel.name, kernel.op)):
            continue
        for name in TARGETS if target is None else (target,):
            place = Target.parse(name)
            if not kernel.requires.check_hardware(place):
                pairs += [Pair(kernel, case.name, name) for case in load_attribute(kernel.aot)(place)]
    return pairs


def is_compiled_here(pair: Pair) -> bool:
    """Whether this installation has the compiler of a kernel's language."""
    return pair.kernel.language != "cutedsl" or importlib.util.find_spec("cutlass") is not None


def compile_one(kernel: str, op: str, case_name: str, target_name: str) -> dict[str, Any]:
    """Compile in this process and read the result."""
    target = Target.parse(target_name)
    spec = default_registry().kernel(op, kernel)
    case = next(c for c in load_attribute(spec.aot or "")(target) if c.name == case_name)
    compiled = _by_cutedsl(case) if isinstance(case, CuteDslCase) else _by_triton(case, target)
    if target.smem_bytes and compiled.shared > target.smem_bytes:
        raise ValueError(
            f"{compiled.shared} bytes of shared memory, and a block of {target_name} has {target.smem_bytes}"
        )
    names = ("vgpr_count", "private_segment_fixed_size") if target.vendor == "amd" else ("REG", "STACK")
    registers, spills = (re.search(rf"\b{name}:\s*(\d+)", compiled.usage) for name in names)
    return {
        "registers": int(registers[1]) if registers else 0,
        "spills": int(spills[1]) if spills else 0,
        "shared": compiled.shared,
        "missing": [p for p in case.promises if p in PROMISES and not re.search(PROMISES[p], compiled.code)],
    }


class Compiled(NamedTuple):
    """Machine code as text, what it uses as text, and its bytes of shared memory."""

    code: str
    usage: str
    shared: int


def _by_cutedsl(case: CuteDslCase) -> Compiled:
    from gristmill.kernels.cutedsl import compile_program

    with tempfile.TemporaryDirectory() as folder:
        source, arch = load_attribute(case.build)(case.config), str(case.config["arch"])
        compile_program(source, arch, "--keep-cubin", f"--dump-dir={folder}")
        (cubin,) = (path.read_bytes() for path in Path(folder).glob("*.cubin"))
    code, usage = (_cuobjdump(option, cubin) for option in ("-sass", "-res-usage"))
    return Compiled(code, usage, 0)


def _by_triton(case: AotCase, target: Target) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.function.arg_names
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    # Launches see 16-byte alignment of pointers and of the sizes named in `aligned`; so does this compilation.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in case.aligned
    }
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.function, signature=signature, constexprs=constants, attrs=aligned)
    triple = target.triton_target
    if triple is None:
        raise ValueError(f"Triton emits no code for {target.name}")
    built = triton.compile(source, target=GPUTarget(*triple), options=dict(case.options))
    if target.vendor == "amd":
        code = usage = built.asm["amdgcn"]
    else:
        code, usage = (_cuobjdump(option, built.asm["cubin"]) for option in ("-sass", "-res-usage"))
    return Compiled(code, usage, built.metadata.shared)


def _cuobjdump(option: str, cubin: bytes) -> str:
    import triton.backends

    binary = Path(next(iter(triton.backends.__path__))) / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(binary), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def answer(task: list[str]) -> dict[str, Any]:
    """What `compile_one` returns, or the reason why a pair cannot be compiled; in a child process."""
    try:
        return compile_one(*task)
    except Exception as error:  # noqa: BLE001  (whatever a compiler raises is the finding)
        return {"cannot": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}


def compile_in(child: Child, pair: Pair) -> dict[str, Any]:
    """The answer of a child process; a compiler that hangs or dies is one too."""
    child.write([pair.kernel.name, pair.kernel.op, pair.case, pair.target])
    try:
        result: dict[str, Any] = child.read()
    except TimeoutError as error:
        return {"cannot": str(error)}
    except ChildProcessError as error:
        return {"cannot": f"the compiler died ({error})"}
    return result


def judge(pair: Pair, usage: dict[str, Any], baseline: dict[str, Any] | None) -> str | None:
    """The fault of a result, or None."""
    if "cannot" in usage:
        return None if baseline and "cannot" in baseline else f"does not compile: {usage['cannot']}"
    if usage["missing"]:
        return f"promised instructions are missing: {', '.join(usage['missing'])}"
    if baseline is None:
        return "not in the baseline; run with --update" if usage["spills"] else None
    if "cannot" in baseline:
        return None
    for name in ("registers", "spills"):
        if usage[name] > baseline[name] * 1.1 + 8:
            return f"{name} rose from {baseline[name]} to {usage[name]}"
    return None


def compile_all(work: list[Pair], jobs: int, deadline: float) -> dict[str, dict[str, Any]]:
    """Key -> what the compilation gave; pairs whose turn comes after the deadline (`time.monotonic`) are left out."""
    children = [Child((__file__, "--worker"), TIMEOUT, subprocess.DEVNULL) for _ in range(jobs)]
    idle: queue.Queue[Child] = queue.Queue()
    results: dict[str, dict[str, Any]] = {}
    for child in children:
        idle.put(child)

    def task(pair: Pair) -> None:
        if time.monotonic() > deadline:
            return
        child = idle.get()
        try:
            results[pair.key] = compile_in(child, pair)
        finally:
            idle.put(child)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(task, work))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.close()
    return results


def _stored(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(result.items()) if name != "missing"}


def read_json(path: Path) -> dict[str, Any]:
    """The table in a file; empty where there is none."""
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return table


def main() -> int:
    """Run the matrix; 0 when every pair is as good as its baseline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="every pair, not a sample")
    parser.add_argument("--update", action="store_true", help="write the baseline from what was found")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE", help="another baseline")
    parser.add_argument("--only", metavar="KERNEL|OP")
    parser.add_argument("--target", metavar="T")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="for how long a sample starts compilations"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(lambda: answer)
        return 0
    triton = version("triton")
    stamps_path = default_cache() / "compile_matrix.json"
    baseline, stamps = read_json(options.baseline), read_json(stamps_path)
    today = datetime.date.today().toordinal()
    work, deadline = pairs(options.only, options.target), float("inf")
    if not (options.full or options.only or options.target):
        work = [pair for pair in work if pair.is_due(today) or stamps.get(pair.key) != pair.stamp(triton)]
        deadline = time.monotonic() + options.seconds
    without = [pair for pair in work if not is_compiled_here(pair)]
    work = [pair for pair in work if is_compiled_here(pair)]
    # A new order every day, so that truncated samples differ from day to day.
    work.sort(key=lambda pair: hashlib.sha256(f"{today}{pair.key}".encode()).hexdigest())
    results = compile_all(work, options.jobs, deadline)
    failures = []
    for pair in (pair for pair in work if pair.key in results):
        usage = results[pair.key]
        failure = judge(pair, usage, usage if options.update else baseline.get(pair.key))
        if failure:
            failures.append(f"FAILED {pair.key}: {failure}")
        else:
            stamps[pair.key] = pair.stamp(triton)
    if options.update:
        existing = {pair.key for pair in pairs(None, None)}
        retained = {key: value for key, value in baseline.items() if key in existing}
        shown = {key: _stored(result) for key, result in results.items()}
        everything = dict(sorted((retained | shown).items()))
        options.baseline.write_text(repository.in_lines(everything, 1) + "\n")
    stamps_path.parent.mkdir(parents=True, exist_ok=True)
    stamps_path.write_text(json.dumps(stamps, sort_keys=True))
    status = repository.report(failures)
    cannot, left = sum("cannot" in result for result in results.values()), len(work) - len(results)
    print(
        f"compile matrix (triton {triton}): {len(results)} compiled, {cannot} known not to, {len(failures)} worse than the baseline"
        + (f", {left} left for another day" if left else "")
        + (f", {len(without)} of CuTe DSL, which is not installed, left out" if without else "")
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
