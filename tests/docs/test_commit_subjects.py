"""Subjects of commits: those after a fixed commit have at most 72 characters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))

import commit_subjects  # noqa: E402


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def history(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    for subject in ("a" * 90, "b" * commit_subjects.LIMIT, "c" * (commit_subjects.LIMIT + 1)):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", subject, "-m", "d" * 100)
    return tmp_path


def test_subjects_of_this_repository_are_short() -> None:
    assert commit_subjects.main([str(ROOT)]) == 0


def test_a_long_subject_is_found(
    history: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted fault; the commit before the first that is checked keeps its subject."""
    monkeypatch.setattr(commit_subjects, "SINCE", git(history, "rev-parse", "HEAD~2"))
    assert commit_subjects.main([str(history)]) == 1
    output = capsys.readouterr().out
    assert output.count("\n") == 1 and "ccc: 73 characters" in output
    git(history, "commit", "-q", "--amend", "--allow-empty", "-m", "Short")
    assert commit_subjects.main([str(history)]) == 0


def test_a_shallow_clone_is_not_checked(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    since, shallow = git(history, "rev-parse", "HEAD~2"), tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{history}", str(shallow))
    assert commit_subjects.too_long(shallow, since) is None and commit_subjects.too_long(history, since)
    assert commit_subjects.main([str(shallow)]) == 0 and "not checked" in capsys.readouterr().out
