"""The commit that made a kernel slower: bisection over the git history. Each commit is built and judged in its own checkout."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
_MEANS = {0: GOOD, 1: BAD, 2: BAD, 3: UNKNOWN, 4: UNKNOWN, 5: UNKNOWN}
"""The verdict on a commit for each exit status of `kernelbench check`."""


class BisectError(ValueError):
    """The history cannot be bisected, or a command failed; the message says where."""


@dataclass(frozen=True)
class JudgedCommit:
    """One commit and its verdict. status: the exit status of the command, None if the build failed."""

    commit: str
    subject: str
    said: str  # GOOD, BAD or UNKNOWN; a field of the JSON output
    status: int | None


@dataclass(frozen=True)
class Culprit:
    """The outcome. suspects: the first bad commit; several if commits between could not be judged."""

    suspects: tuple[str, ...]
    tried: tuple[JudgedCommit, ...]


def search(commits: Sequence[str], judge: Callable[[str], str]) -> list[str]:
    """The commits that may be the first bad one, oldest first. `commits` are in order: the parent of the first is known
    to be good, the last one to be bad. If a commit is UNKNOWN, its nearest neighbours are judged instead.
    """
    low, high, known = -1, len(commits) - 1, {}
    while high - low > 1:
        middle = (low + high) // 2
        order = sorted((n for n in range(low + 1, high) if n not in known), key=lambda n: abs(n - middle))
        if not order:
            break
        verdict = judge(commits[order[0]])
        if verdict == GOOD:
            low = order[0]
        elif verdict == BAD:
            high = order[0]
        else:
            known[order[0]] = verdict
    return list(commits[low + 1 : high + 1])


def bisect(
    repository: Path,
    good: str,
    bad: str,
    command: Sequence[str],
    *,
    build: str | None,
    work: Path,
    retries: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> Culprit:
    """Find the first commit after `good`, up to `bad`, at which `command` exits with 1 or 2.

    Each commit is checked out in a work tree under `work`, where `build` (a shell line) and `command` run. After 3,
    too noisy, it runs again up to `retries` times. BisectError if `good` is no ancestor of `bad`, or if `good` is bad or `bad` is good.
    """
    commits = _git(repository, "rev-list", "--reverse", "--first-parent", f"{good}..{bad}").split()
    if not commits or _git(repository, "merge-base", good, bad) != _git(
        repository, "rev-parse", f"{good}^{{commit}}"
    ):
        raise BisectError(f"{good} is no ancestor of {bad}: nothing lies between them")
    tree, tried = work / "tree", {}
    _git(repository, "worktree", "add", "--detach", "--force", str(tree), bad)

    def judge(commit: str) -> str:
        if commit not in tried:
            subject = _git(repository, "log", "-1", "--format=%s", commit)
            progress(f"{commit[:10]} {subject}")
            tried[commit] = JudgedCommit(commit, subject, *_judge(tree, commit, command, build, retries))
        return tried[commit].said

    try:
        first = _git(repository, "rev-parse", f"{good}^{{commit}}")
        for commit, expected in ((first, GOOD), (commits[-1], BAD)):
            if (verdict := judge(commit)) != expected:
                raise BisectError(
                    f"{commit[:10]} ({tried[commit].subject}) is {verdict}, not {expected}: the command ended with "
                    f"{tried[commit].status}"
                )
        return Culprit(tuple(search(commits, judge)), tuple(tried.values()))
    finally:
        _git(repository, "worktree", "remove", "--force", str(tree))


def _judge(
    tree: Path, commit: str, command: Sequence[str], build: str | None, retries: int
) -> tuple[str, int | None]:
    _git(tree, "checkout", "--quiet", "--detach", "--force", commit)
    if (
        build is not None
        and subprocess.run(build, shell=True, cwd=tree, capture_output=True, check=False).returncode
    ):
        return UNKNOWN, None
    status = 3
    for _ in range(1 + retries):
        try:
            status = subprocess.run(command, cwd=tree, capture_output=True, check=False).returncode
        except OSError as error:
            raise BisectError(f"{command[0]}: {error.strerror}") from error
        if status != 3:
            break
    return _MEANS.get(status, UNKNOWN), status


def _git(where: Path, *arguments: str) -> str:
    process = subprocess.run(
        ["git", "-C", str(where), *arguments], capture_output=True, text=True, check=False
    )
    if process.returncode:
        message = process.stderr.strip() or f"exit status {process.returncode}"
        raise BisectError(f"git {arguments[0]}: {message}")
    return process.stdout.strip()
