"""What tests prove of each architecture: the facts of runtime/models/supported.md, read from the tests themselves.

A test is decorated with `proves`, for the architectures of its parameters. A claim without such a test is a line that differs from the
generated one, and fails `tests/docs/test_generated.py`. What ran on a GPU counts only as a result file says so.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.runtime.models import families, text_parts
from gristmill.runtime.models.proven import COLUMNS, PAGE

ROOT = Path(__file__).resolve().parents[2]
GREEDY = "CPU"
"""Greedy ids and logits in float32 on the CPU equal transformers'."""
BEGIN, END = "<!-- table -->", "<!-- /table -->"


@dataclass(frozen=True)
class Proof:
    """What the cases of a test prove.

    Attributes:
        what: the entry of a column.
        of: an architecture, or the architecture of each value of the parameter `by`.
        record: the result files of runs of the test on a GPU, a pattern relative to the repository. While there is none, nothing is proven.
    """

    column: str
    what: str
    of: str | Mapping[str, str]
    by: str = "name"
    record: str | None = None


def proves(column: str, what: str, of: str | Mapping[str, str], **more: str) -> Callable[[Any], Any]:
    """Says what a test proves; arguments are those of `Proof`."""
    if column not in COLUMNS:
        raise ValueError(f"a proof is of one of the columns {', '.join(COLUMNS)}, got {column!r}")

    def decorate(function: Any) -> Any:
        function.__dict__.setdefault("proofs", []).append(Proof(column, what, of, **more))
        return function

    return decorate


def values(function: Any, parameter: str) -> list[Any]:
    """The values that a test's ``parametrize`` gives a parameter."""
    for mark in getattr(function, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        names, cases = mark.args
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        if parameter not in names:
            continue
        place, found = names.index(parameter), []
        for case in cases:
            row = getattr(case, "values", None)  # of pytest.param; a dict has a method of this name
            row = row if isinstance(row, tuple) else (case,) if len(names) == 1 else case
            found.append(row[place])
        return found
    raise ValueError(f"{function.__name__} has no parameter {parameter!r} whose cases it could prove")


def recorded(file: Path, function: Any, record: Path, cases: Iterable[str]) -> tuple[str, set[str]]:
    """The device of the first run of the test that a result file has, and the cases that failed there; ValueError if it has no run in which
    one passed. A failure is written with its case in brackets, else it is that of all cases."""
    place = file.relative_to(ROOT)
    for run in json.loads(record.read_text(encoding="utf-8"))["runs"]:
        words = run["command"].split()
        whole = "-k" not in words and "gpu and alone" not in run["command"]
        if not whole or not (str(place) in words or str(place.parent) in words):
            continue
        failures = [failure for failure in run["failed"] if function.__name__ in failure]
        failed = {case for case in cases if any("[" not in each or case in each for each in failures)}
        if len(failed) < len(set(cases)):
            return str(run["device"]).removeprefix("NVIDIA "), failed
    raise ValueError(f"{record} has no run in which {place}::{function.__name__} passed")


def results(file: Path, function: Any, proof: Proof, cases: Iterable[str]) -> Iterator[tuple[str, set[str]]]:
    """What is proven, and by which cases it is not."""
    if proof.record is None:
        yield proof.what, set()
        return
    for record in sorted(ROOT.glob(proof.record)):
        device, failed = recorded(file, function, record, cases)
        yield f"{device} ({record.relative_to(ROOT)})", failed


def tests() -> Iterator[tuple[Path, Any]]:
    """The decorated tests, with their files."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if "@proves(" in file.read_text(encoding="utf-8"):
            module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
            for function in vars(module).values():
                if hasattr(function, "proofs") and function.__module__ == module.__name__:
                    yield file, function


def facts() -> dict[str, dict[str, list[str]]]:
    """Architecture -> column -> what was proven."""
    found: dict[str, dict[str, list[str]]] = {
        name: {column: [] for column in COLUMNS} for name in (*families(), *text_parts())
    }
    for file, function in tests():
        for proof in function.proofs:
            if isinstance(proof.of, str):
                cases = {"": proof.of}  # any failure is one of this
            else:
                cases = {value: proof.of[value] for value in values(function, proof.by) if value in proof.of}
            for architecture in cases.values():
                if architecture not in found:
                    raise ValueError(
                        f"{function.__name__} is about {architecture!r}, which no family declares"
                    )
            for what, failed in results(file, function, proof, cases):
                lacking = {cases[case] for case in failed}
                for architecture in dict.fromkeys(cases.values()):
                    cell = found[architecture][proof.column]
                    cell += [what] if what not in cell and architecture not in lacking else []
    for cells in found.values():
        for cell in cells.values():
            cell.sort()
    return found


def page() -> str:
    """supported.md with its table."""
    found = facts()
    lines = [f"| architecture | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, cells in sorted(found.items(), key=lambda item: item[0].lower()):
        lines.append(f"| {name} | {' | '.join(', '.join(cells[column]) for column in COLUMNS)} |")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{rest.partition(END)[2]}"])
