"""What both command lines share: exit statuses with one meaning each, and tables that stay readable."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import click
import pytest
from rich.console import Console

from gristmill import console

ROWS = [
    ["rms_norm_triton_of_a_long_name", 1234.5, "no [bold]code[/bold] for x[c=1,d=2]"],
    ["b", 0.000394, ""],
]


def printed(monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    text = io.StringIO()
    monkeypatch.setattr(
        console, "out", lambda: Console(file=text, width=width, highlight=False, markup=False)
    )
    console.table("Times", ("kernel", "µs cold", "reason"), ROWS, right=("µs cold",))
    return text.getvalue()


def test_a_narrow_table_folds_no_number_and_a_narrower_one_is_paragraphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folded = printed(monkeypatch, 46)
    assert "kernel" in folded.splitlines()[1] and "µs cold" in folded.splitlines()[1]
    assert " 1234.5 " in folded and " 0.000394 " in folded
    narrow = printed(monkeypatch, 38).splitlines()
    assert "µs cold  1234.5" in narrow and "kernel   b" in narrow and "µs cold  0.000394" in narrow
    assert max(map(len, narrow)) <= 38


def test_a_title_is_not_folded_to_a_narrow_table(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(console, "out", lambda: Console(file=text, width=80, highlight=False, markup=False))
    console.table("a title that is wider than its table", ("a", "b"), [["1", "2"]])
    assert text.getvalue().splitlines()[0] == "a title that is wider than its table"


def test_text_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no [bold]code[/bold] for x[c=1,d=2]" in printed(monkeypatch, 160)


def run_body(body: str, tmp_path: Path, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command whose body is `body` as the command lines are run. stdout: where to, a pipe by default."""
    program = tmp_path / "program.py"
    program.write_text(
        "import click\nfrom gristmill import console\nfrom gristmill.autotune.errors import UnverifiableError\n\n@click.command()\ndef it():\n"
        + textwrap.indent(body, "    ")
        + "\n\nconsole.run(it, 'program')\n",
        encoding="utf-8",
    )
    return subprocess.run(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_a_bug_is_no_verdict(tmp_path: Path) -> None:
    result = run_body("{}['x']", tmp_path)
    assert result.returncode == console.CRASHED and "KeyError: 'x'" in result.stderr


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("raise ValueError('two\\nlines')", "program: two lines\n"),
        ("open('/nowhere/x')", "program: /nowhere/x: No such file or directory\n"),
        ("open('/etc/hostname/x', 'w')", "program: /etc/hostname/x: Not a directory\n"),
        ("raise OSError(28, 'No space left on device')", "program: No space left on device\n"),
        ("raise UnverifiableError('no memory')", "program: no memory\n"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_2(tmp_path: Path, body: str, complaint: str) -> None:
    result = run_body(body, tmp_path)
    assert (result.returncode, result.stderr) == (2, complaint)


def test_an_interrupt_says_so(tmp_path: Path) -> None:
    result = run_body("raise KeyboardInterrupt", tmp_path)
    assert result.returncode == console.INTERRUPTED and result.stderr.strip() == "program: interrupted"


@pytest.mark.parametrize(
    "body", ["console.emit(['x'])", "console.emit(['x'] * 9999)", "console.table('t', ['c'], [['x']] * 9999)"]
)
def test_a_reader_that_left_is_no_verdict_either(tmp_path: Path, body: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = run_body(body, tmp_path, stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (console.READER_GONE, "")


def test_output_that_the_caller_closed_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    for stream in ("stdout", "stderr"):  # as Python has them under >&- 2>&-
        monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit) as stop:
        console.run(click.Command("it", callback=lambda: console.table("t", ["c"], [["x"]])), "program")
    assert stop.value.code == 0


def test_a_table_of_rows_takes_keys_and_functions(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "us": 3.14159, "n": 2}, {"name": "b", "us": None, "n": None}]
    columns: dict[str, console.Cell] = {
        "kernel": "name",
        "µs": "us",
        "twice": lambda r: r["n"] and 2 * r["n"],
    }
    console.table_of("Times", rows, columns, right=("µs",))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["Times"], ["kernel", "µs", "twice"], ["a", "3.14", "4"], ["b", "-"]]
