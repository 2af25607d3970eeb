"""Commands in the documents run and print what is shown.

A block ```console is exact, with ``...`` for what may differ; in ```console measured every number may differ.
A block that also says ``slow`` runs in the long tier.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests import ceilings, forked

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = {
    "kernelbench": ("-m", "gristmill.bench.cli"),
    "gristmill": ("-m", "gristmill.tools.cli"),
    "python": (),
}


def _blocks() -> list[object]:
    blocks = []
    for page in PAGES:
        for flags, text in re.findall(
            r"```console([^\n]*)\n(.*?)```", page.read_text(encoding="utf-8"), re.S
        ):
            command, _, shown = text.partition("\n")
            marks = [pytest.mark.slow] if "slow" in flags.split() else []
            blocks.append(
                pytest.param(
                    command, shown, "measured" in flags.split(), marks=marks, id=f"{page.name}: {command}"
                )
            )
    return blocks


def lines_of(text: str, measured: bool) -> list[str]:
    """Returns the lines without the padding of tables, and with # for numbers that are measurements."""
    if measured:
        text = re.sub(r"(?<![\w])[\d,]*\.?\d+(e[+-]?\d+)?(?![\w.])", "#", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether `printed` equals `shown`, where a line ``...`` stands for any lines and ``...`` in a line for
    any text."""
    any_lines, any_text = r"(?:.*\n)*?", ".*"
    parts = [
        any_lines if line == "..." else re.escape(line).replace(re.escape("..."), any_text) + r"\n"
        for line in shown
    ]
    return re.fullmatch("".join(parts), "".join(line + "\n" for line in printed)) is not None


@pytest.mark.parametrize(("command", "shown", "measured"), _blocks())
def test_a_command_prints_what_is_shown(
    command: str, shown: str, measured: bool, policy_file, tmp_path: Path
) -> None:
    policy_file()
    if " bench " in command:
        ceilings.keep(tmp_path / "cache")  # to measure them takes seconds
    assert command.startswith("$ ")
    program, *arguments = shlex.split(command[2:])
    environment = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}
    environment.pop("TRITON_INTERPRET", None)
    process = forked.run(*PROGRAMS[program], *arguments, env=environment, cwd=ROOT, workers=True)
    assert process.returncode == 0, process.stderr
    printed, expected = lines_of(process.stdout, measured), lines_of(shown, measured)
    assert matches(expected, printed), "\n".join(["shown:", *expected, "", "printed:", *printed])


def test_a_wrong_number_or_line_is_seen() -> None:
    shown = lines_of("a 1\n...\nlast 2.5 ms", measured=False)
    assert matches(shown, ["a 1", "between", "more", "last 2.5 ms"]) and matches(
        shown, ["a 1", "last 2.5 ms"]
    )
    assert not matches(shown, ["a 2", "last 2.5 ms"]) and not matches(shown, ["a 1", "between"])
    assert lines_of("x 1,024 7 % k16", measured=True) == ["x # # % k16"]
