"""What tests prove of each architecture: the facts of runtime/models/supported.md, read from the tests themselves.

A test is decorated with `proves`, for the architectures of its parameters. A claim without such a test is a line that differs from the
generated one, and fails `tests/docs/test_generated.py`. What ran on a GPU counts only as a result file says so.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
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
        record: the result file of a run of the test on a GPU, relative to the repository.
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


def recorded(file: Path, function: Any, record: str) -> str:
    """The device of a run that passed the test, as its result file says; ValueError if no run did."""
    place = file.relative_to(ROOT)
    for run in json.loads((ROOT / record).read_text(encoding="utf-8"))["runs"]:
        words = run["command"].split()
        covered = str(place) in words or str(place.parent) in words
        if covered and not any(function.__name__ in failed for failed in run["failed"]):
            return str(run["device"]).removeprefix("NVIDIA ")
    raise ValueError(f"{record} has no run in which {place}::{function.__name__} passed")


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
            what = proof.what
            if proof.record is not None:
                what = f"{recorded(file, function, proof.record)} ({proof.record})"
            cases = [proof.of]
            if not isinstance(proof.of, str):
                cases = [proof.of[value] for value in values(function, proof.by) if value in proof.of]
            for architecture in dict.fromkeys(cases):
                if architecture not in found:
                    raise ValueError(
                        f"{function.__name__} is about {architecture!r}, which no family declares"
                    )
                cell = found[architecture][proof.column]
                cell += [what] if what not in cell else []
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
