"""Compile Triton kernels of the registry ahead of time for every target they claim; no GPU is needed.

    python ci/compile_matrix.py                 a sample: what changed since it was last compiled, and a rotating share,
                                                for 40 seconds at most (--seconds)
    python ci/compile_matrix.py --full          everything
    python ci/compile_matrix.py --only rms_norm --target sm_90
    python ci/compile_matrix.py --full --update write ci/compile_baseline.json

For each (kernel, case, target): registers, spilled bytes, shared memory, and the instructions that the kernel promises.
Registers or spills above the committed baseline fail; so does a pair that stops compiling. A pair that cannot compile,
for a known reason, is in the baseline with that reason. Each compilation has a time-out.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # only as a program: an import must not change the interpreter setting
    os.environ.pop("TRITON_INTERPRET", None)

from gristmill.kernel_registry.kernel import Kernel, load_attribute
from gristmill.kernel_registry.policy import default_cache
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
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


def pairs(only: str | None, target: str | None) -> list[Pair]:
    """Every (kernel, case, target) that the registry's Triton kernels claim."""
    pairs = []
    for kernel in default_registry().all_kernels():
        if kernel.aot is None or (only and only not in (kernel.name, kernel.op)):
            continue
        for name in TARGETS if target is None else (target,):
            place = Target.parse(name)
            if not kernel.requires.check_hardware(place):
                pairs += [Pair(kernel, case.name, name) for case in load_attribute(kernel.aot)(place)]
    return pairs


def compile_one(kernel: str, op: str, case_name: str, target_name: str) -> dict[str, Any]:
    """Compile in this process and read the result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = Target.parse(target_name)
    spec = default_registry().kernel(op, kernel)
    case = next(c for c in load_attribute(spec.aot or "")(target) if c.name == case_name)
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
        raise ValueError(f"Triton emits no code for {target_name}")
    built = triton.compile(source, target=GPUTarget(*triple), options=dict(case.options))
    usage = _amd(built.asm["amdgcn"]) if target.vendor == "amd" else _nvidia(built.asm["cubin"])
    usage["shared"] = built.metadata.shared
    text = built.asm["amdgcn"] if target.vendor == "amd" else _sass(built.asm["cubin"])
    missing = [p for p in case.promises if p in PROMISES and not re.search(PROMISES[p], text)]
    return {**usage, "missing": missing}


def _amd(text: str) -> dict[str, int]:
    counts = {
        name: int(value)
        for name, value in re.findall(
            r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text
        )
    }
    return {"registers": counts.get("vgpr_count", 0), "spills": counts.get("private_segment_fixed_size", 0)}


def _nvidia(cubin: bytes) -> dict[str, int]:
    text = _tool("cuobjdump", "-res-usage", cubin)
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": usage.get("REG", 0), "spills": usage.get("STACK", 0)}


def _sass(cubin: bytes) -> str:
    return _tool("cuobjdump", "-sass", cubin)


def _tool(name: str, option: str, cubin: bytes) -> str:
    import triton.backends

    binary = Path(next(iter(triton.backends.__path__))) / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(binary), option, file.name], capture_output=True, text=True, check=True
        ).stdout


class Compiler:
    """A child process that compiles one pair after another, killed and replaced when one takes too long."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str | None] = queue.Queue()

    def run(self, pair: Pair) -> dict[str, Any]:
        if self.process is None or self.process.poll() is not None:
            self.answers = queue.Queue()
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._pump, args=(self.process, self.answers), daemon=True).start()
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps([pair.kernel.name, pair.kernel.op, pair.case, pair.target]) + "\n"
        )
        self.process.stdin.flush()
        try:
            line = self.answers.get(timeout=TIMEOUT)
        except queue.Empty:
            self.process.kill()
            self.process.wait()
            return {"cannot": f"did not finish in {TIMEOUT:.0f} s"}
        return (
            json.loads(line)
            if line is not None
            else {"cannot": f"the compiler died (status {self.process.wait()})"}
        )

    @staticmethod
    def _pump(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put(None)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()


def worker() -> None:
    """Answer pairs from standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = compile_one(*json.loads(line))
        except Exception as error:  # noqa: BLE001  (whatever a compiler raises is the finding)
            answer = {"cannot": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


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


def lines(entries: dict[str, Any]) -> str:
    """A baseline as JSON, one line per pair."""
    rows = (f"{json.dumps(key)}: {json.dumps(entries[key], sort_keys=True)}" for key in sorted(entries))
    return "{\n" + ",\n".join(rows) + "\n}\n"


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
    parser.add_argument("--verbose", action="store_true", help="a line for each compilation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="how long a sample keeps starting compilations"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return 0
    import importlib.metadata

    version = importlib.metadata.version("triton")
    baseline = json.loads(options.baseline.read_text()) if options.baseline.exists() else {}
    stamps_path = default_cache() / "compile_matrix.json"
    stamps = json.loads(stamps_path.read_text()) if stamps_path.exists() else {}
    today = datetime.date.today().toordinal()
    work = []
    for pair in pairs(options.only, options.target):
        stamp = f"{pair.kernel.code_hash()},{version}"
        is_due = int(hashlib.sha256(pair.key.encode()).hexdigest(), 16) % ROTATION == today % ROTATION
        if options.full or options.only or options.target or stamps.get(pair.key) != stamp or is_due:
            work.append(pair)
    # A new order every day, so that truncated samples differ from day to day.
    work.sort(key=lambda pair: hashlib.sha256(f"{today}{pair.key}".encode()).hexdigest())
    chosen = options.full or options.only or options.target
    deadline = float("inf") if chosen else time.monotonic() + options.seconds
    results: dict[str, dict[str, Any]] = {}
    compilers: queue.Queue[Compiler] = queue.Queue()
    for _ in range(options.jobs):
        compilers.put(Compiler())

    def task(pair: Pair) -> None:
        if time.monotonic() > deadline:
            return
        compiler = compilers.get()
        try:
            start = time.monotonic()
            results[pair.key] = compiler.run(pair)
            if options.verbose:
                print(f"{time.monotonic() - start:6.1f} s {pair.key} {results[pair.key]}", flush=True)
        finally:
            compilers.put(compiler)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(task, work))
    while not compilers.empty():
        compilers.get().close()
    failures, left = 0, sum(pair.key not in results for pair in work)
    work = [pair for pair in work if pair.key in results]
    for pair in work:
        usage = results[pair.key]
        failure = judge(pair, usage, usage if options.update else baseline.get(pair.key))
        if failure:
            failures += 1
            print(f"FAILED {pair.key}: {failure}")
        else:
            stamps[pair.key] = f"{pair.kernel.code_hash()},{version}"
    if options.update:
        existing = {pair.key for pair in pairs(None, None)}
        retained = {key: value for key, value in baseline.items() if key in existing}
        shown = {key: {k: v for k, v in result.items() if k != "missing"} for key, result in results.items()}
        options.baseline.write_text(lines(retained | shown))
    stamps_path.parent.mkdir(parents=True, exist_ok=True)
    stamps_path.write_text(json.dumps(stamps, sort_keys=True))
    cannot = sum("cannot" in results[pair.key] for pair in work)
    print(
        f"compile matrix (triton {version}): {len(work)} compiled, {cannot} known not to, {failures} worse than the baseline"
        + (f", {left} left for another day" if left else "")
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
