"""Proof reports: what `kernelbench prove` found on one device, as a file that is evidence elsewhere.

A report has a row per kernel and example problem, with the hash of the code that ran. It counts for a kernel as long as the
kernel's code has that hash (`judged`): after a change of the code, a report of the old code counts neither for nor against it.

Its digest covers everything else in the file. It shows that a file was damaged or edited after it was written. It is no signature:
who writes a false report on purpose can also write its digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.autotune.place import Place
from gristmill.bench import result_file, result_text
from gristmill.bench.examples import Example
from gristmill.bench.result_file import ResultError
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import Registry
from gristmill.kernel_registry.target import Target

KIND = "proof"
STATES = {
    "proven": "matched the reference on every example",
    "failed": "did not match the reference",
    "outdated": "the report is about other code",
    "incomplete": "not every example was run",
    "unjudged": "the reference did not run, or memory was short",
    "unknown": "no such kernel",
}
"""What a report says of a kernel -> its meaning."""


@dataclass(frozen=True)
class Finding:
    """What a report says of one kernel now: one of `STATES`, and the details."""

    state: str
    reason: str

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}"


def row(example: Example, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a report; its ``ok`` is None if the outcome says nothing about the kernel."""
    return {
        "op": example.op.name,
        "kernel": example.kernel.name,
        "problem": str(example.problem),
        "config": dict(example.config),
        "code": example.kernel.code_hash(example.config, built=True),
        "ok": outcome["ok"] if outcome["judged"] else None,
        "error": outcome["error"],
        "tolerance": example.op.tolerance(example.problem).limit,
        "reason": outcome["reason"],
    }


def report(
    here: Place,
    rows: Sequence[dict[str, Any]],
    refused: Mapping[str, str],
    renewed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of a report; `refused` has the kernels of which nothing ran, with the reason. renewed: the report of which rows were kept, some
    of them of earlier ones perhaps."""
    content = result_file.record(here, rows, kind=KIND, refused=dict(refused))
    if renewed is not None:
        content["renewed"] = {
            name: renewed[name] for name in ("when", "environment", "renewed") if name in renewed
        }
    return content | {"digest": digest(content)}


def proving(data: Mapping[str, Any], registry: Registry) -> list[dict[str, Any]]:
    """The rows of a report that prove the present code of their kernel."""
    proven = {name for name, finding in judged(data, registry).items() if finding.state == "proven"}
    return [one for one in data["rows"] if one["kernel"] in proven]


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of everything in a report but its digest."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a report atomically."""
    result_file.replace(path, result_text.text(content, digits=None))


def read(path: str | Path) -> dict[str, Any]:
    """Read a report, with present names of kernels.

    ResultError: it is no report, was changed after it was written, or contradicts itself; FileNotFoundError: it does not exist.
    """
    data = result_file.read(path)
    if data.get("kind") != KIND:
        raise ResultError(
            f"{path}: expected a report of kernelbench prove, found a file of kind {data.get('kind')!r}"
        )
    stored = json.loads(Path(path).read_text(encoding="utf-8"))  # as it was written, names included
    if data.get("digest") != digest(stored):
        raise ResultError(
            f"{path}: its digest is not that of its content: it was changed after kernelbench prove wrote it; "
            "run kernelbench prove again"
        )
    try:
        Target.parse(data["environment"]["target"])
    except (KeyError, TypeError, ValueError) as error:
        raise ResultError(f"{path}: environment: target: {error}") from error
    seen: set[tuple[str, str]] = set()
    for place, one in enumerate(data["rows"]):
        why = _contradiction(one)
        if not why and (one["kernel"], one["problem"]) in seen:
            why = f"{one['kernel']} {one['problem']} has two rows"
        if why:
            raise ResultError(f"{path}: rows[{place}]: {why}")
        seen.add((one["kernel"], one["problem"]))
    return data


def _contradiction(one: Mapping[str, Any]) -> str:
    """What is wrong with a row; "" if nothing."""
    missing = {"config", "code", "ok", "error", "tolerance", "reason"} - one.keys()
    if missing:
        return f"expected {', '.join(sorted(missing))}"
    if not isinstance(one["config"], dict) or not isinstance(one["code"], str) or not one["code"]:
        return "expected a configuration, and the hash of the code"
    if one["ok"] not in (True, False, None) or not isinstance(one["reason"], str):
        return "expected ok true, false or null, and a reason as text"
    for name in ("error", "tolerance"):
        if one[name] is not None and not _is_number(one[name]):
            return f"{name}: expected a number or null, found {one[name]!r}"
    if one["ok"] is True and (one["error"] is None or one["tolerance"] is None):
        return "it is ok, without an error and a tolerance"
    if one["ok"] is True and one["error"] > one["tolerance"]:
        return f"it is ok, with an error of {one['error']:.3g} over the tolerance {one['tolerance']:.3g}"
    if one["ok"] is not True and not one["reason"]:
        return "it is not ok, without a reason"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def judged(data: Mapping[str, Any], registry: Registry) -> dict[str, Finding]:
    """Kernel -> what a report says of it, with its present code, examples and tolerances."""
    target = Target.parse(data["environment"]["target"])
    of: dict[str, list[Mapping[str, Any]]] = {}
    for one in data["rows"]:
        of.setdefault(one["kernel"], []).append(one)
    kernels = {kernel.name: kernel for kernel in registry.all_kernels()}
    return {
        name: _finding(kernels[name], rows, target, registry)
        if name in kernels
        else Finding("unknown", "the registry has no such kernel")
        for name, rows in of.items()
    }


def _finding(
    kernel: Kernel, rows: Sequence[Mapping[str, Any]], target: Target, registry: Registry
) -> Finding:
    op = registry.op(kernel.op)
    if reasons := kernel.requires.check_hardware(target):
        return Finding("unknown", f"it does not run there: {'; '.join(reasons)}")
    if interprets(kernel, target):
        return Finding("unjudged", "on a CPU Triton only interprets")
    codes: dict[str, str] = {}
    expected = [str(op.problem(text)) for text in op.test_problems(kernel)]
    present, old = [], ""
    for one in rows:
        key = json.dumps(one["config"], sort_keys=True)
        if key not in codes:
            codes[key] = kernel.code_hash(one["config"])
        if one["code"] != codes[key]:
            old = f"code {one['code']} ran, the present one is {codes[key]}"
        elif one["problem"] in expected:
            present.append(one)
    for one in present:
        if one["ok"] is False:
            return Finding("failed", f"{one['problem']}: {one['reason']}")
    if old:
        return Finding("outdated", old)
    ran = {one["problem"] for one in present}
    if lacking := [text for text in expected if text not in ran]:
        return Finding(
            "incomplete", f"without {lacking[0]}" + (f" and {len(lacking) - 1} more" * (len(lacking) > 1))
        )
    for one in present:
        if one["ok"] is None:
            return Finding("unjudged", f"{one['problem']}: {one['reason']}")
        limit = op.tolerance(op.problem(one["problem"])).limit
        if one["error"] > limit:
            return Finding(
                "outdated", f"{one['problem']}: error {one['error']:.3g}, the tolerance is now {limit:.3g}"
            )
    return Finding("proven", f"{len(present)} examples")


def interprets(kernel: Kernel, target: Target) -> bool:
    """Whether the kernel would run in Triton's interpreter, which proves nothing of the device."""
    return kernel.language == "triton" and target.vendor == "cpu"
