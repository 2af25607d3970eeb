"""Named suites of problems, and patterns that stand for several problems: ``m=1|16|64,n=4096,k=4096``."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry

SUITES = Path(__file__).parent / "suites"
OF_AN_OPERATION = ("default", "examples")
"""Suites that every operation has: its benchmark problems, and its examples."""


class SuiteError(ValueError):
    """The suite does not exist or cannot be read; the message says what was expected and what was given."""


@dataclass(frozen=True)
class Suite:
    """A suite: the name of its file, a one-line description, and (operation, problem) pairs."""

    name: str
    what: str
    problems: tuple[tuple[Op, Problem], ...]


def expand(text: str) -> list[str]:
    """Every problem that `text` stands for: ``|`` separates alternatives of an axis; the last axis varies fastest."""
    axes = [
        [f"{name}{equals}{value}" for value in values.split("|")]
        for name, equals, values in (part.partition("=") for part in text.split(","))
    ]
    return [",".join(chosen) for chosen in itertools.product(*axes)]


def suite_names() -> list[str]:
    """The suites that are shipped."""
    return sorted(path.stem for path in SUITES.glob("*.json"))


def load_suite(name: str) -> Suite:
    """A shipped suite, or one from a file. SuiteError: the suite is invalid; AxisError: one of its problems is."""
    path = SUITES / f"{name}.json"
    path = path if path.is_file() else Path(name)
    if not path.is_file():
        raise SuiteError(
            f"suite {name!r}: expected a file, {', '.join(OF_AN_OPERATION)}, or one of {', '.join(suite_names())}"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SuiteError(f"{path}: line {error.lineno}: {error.msg}") from error
    named = data.get("problems") if isinstance(data, dict) else None
    if not isinstance(named, dict) or not all(isinstance(texts, list) for texts in named.values()):
        raise SuiteError(f'{path}: expected {{"what": TEXT, "problems": {{OPERATION: [PROBLEM, ...]}}}}')
    problems = []
    for op_name, texts in named.items():
        op = default_registry().op(op_name)
        problems += [(op, op.problem(text)) for line in texts for text in expand(line)]
    return Suite(path.stem, str(data.get("what", "")), tuple(problems))
