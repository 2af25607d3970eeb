"""Bisection finds the planted commit, steps around commits that cannot be judged, and reports when it cannot
succeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gristmill.bench.bisect import BAD, GOOD, UNKNOWN, search
from gristmill.bench.cli import cli


@pytest.mark.parametrize("count", [1, 2, 3, 8, 33])
def test_the_first_bad_one_is_found_quickly(count: int) -> None:
    commits = [str(n) for n in range(count)]
    for first in range(count):
        judged: list[str] = []

        def judge(commit: str, first: int = first, judged: list[str] = judged) -> str:
            judged.append(commit)
            return BAD if int(commit) >= first else GOOD

        assert search(commits, judge) == [str(first)] and len(judged) <= count.bit_length()


def test_what_cannot_be_judged_is_stepped_around() -> None:
    commits = [str(n) for n in range(16)]
    verdicts = {n: UNKNOWN if n in (6, 7, 8) else BAD if n >= 11 else GOOD for n in range(16)}
    assert search(commits, lambda c: verdicts[int(c)]) == ["11"]
    verdicts = {n: UNKNOWN if n in (6, 7, 8) else BAD if n >= 7 else GOOD for n in range(16)}
    assert search(commits, lambda c: verdicts[int(c)]) == ["6", "7", "8", "9"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Seven commits; `check.py` exits with the number in the file `status`: 0 0 3 0 1 4 1."""
    path = tmp_path / "repo"
    path.mkdir()

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(path), "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
            check=True,
            capture_output=True,
        )

    git("init", "-q")
    for number, status in enumerate((0, 0, 3, 0, 1, 4, 1)):
        (path / "status").write_text(str(status))
        (path / "number").write_text(str(number))
        git("add", "-A")
        git("commit", "-qm", f"commit {number}")
        git("tag", f"c{number}")
    return path


COMMAND = (sys.executable, "-c", "import sys; sys.exit(int(open('status').read()))")


def test_the_command_line_names_the_commit(repository: Path) -> None:
    result = CliRunner().invoke(
        cli,
        ["bisect", "--good", "c0", "--bad", "c6", "--repository", str(repository), "--json", "--", *COMMAND],
    )
    output = json.loads(result.stdout)
    assert result.exit_code == 0 and len(output["suspects"]) == 1
    subjects = {t["commit"]: t["subject"] for t in output["tried"]}
    assert subjects[output["suspects"][0]] == "commit 4"
    trees = subprocess.run(
        ["git", "-C", str(repository), "worktree", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert len(trees.splitlines()) == 1


def test_a_build_that_fails_makes_a_commit_unknown(repository: Path) -> None:
    result = CliRunner().invoke(
        cli,
        [
            "bisect",
            "--good",
            "c0",
            "--bad",
            "c6",
            "--repository",
            str(repository),
            "--json",
            "--build",
            "test $(cat number) != 4 && test $(cat number) != 3",
            "--",
            *COMMAND,
        ],
    )
    output = json.loads(result.stdout)
    # 2 was too noisy, 3 and 4 do not build, 5 ran in another environment: the first bad commit is one of 2 to
    # 6.
    assert len(output["suspects"]) == 5
    assert {t["status"] for t in output["tried"] if t["said"] == UNKNOWN} == {None, 3, 4}


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        ("c6", "c0", "no ancestor"),
        ("c4", "c6", "is bad, not good"),
        ("c0", "c3", "is good, not bad"),
        ("c0", "c9", "git "),
    ],
)
def test_ends_that_are_not_as_said_are_refused(repository: Path, good: str, bad: str, complaint: str) -> None:
    result = CliRunner().invoke(
        cli, ["bisect", "--good", good, "--bad", bad, "--repository", str(repository), "--", *COMMAND]
    )
    assert result.exit_code != 0 and complaint in str(result.exception)
