"""Which commit made it slower: bisection over git history, each commit built and judged in a checkout of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
_MEANS = {0: GOOD, 1: BAD, 2: BAD, 3: UNKNOWN, 4: UNKNOWN, 5: UNKNOWN}
"""What exit statuses of `kernelbench check` say of a commit."""


class BisectError(ValueError):
    """A history that cannot be bisected, or a command that failed; the message says where."""


@dataclass(frozen=True)
class Tried:
    """One commit and what was said of it. status: of the command, None when the build failed."""

    commit: str
    subject: str
    said: str
    status: int | None


@dataclass(frozen=True)
class Culprit:
    """The outcome. suspects: the first bad commit; more than one where commits between could not be judged."""

    suspects: tuple[str, ...]
    tried: tuple[Tried, ...]


def search(commits: Sequence[str], judge: Callable[[str], str]) -> list[str]:
    """The commits among which the first bad one is, the oldest first. `commits` are in order; what comes before the first
    is known good, and the last is known bad. A commit that is UNKNOWN makes its nearest neighbours be asked instead.
    """
    low, high, known = -1, len(commits) - 1, {}
    while high - low > 1:
        middle = (low + high) // 2
        order = sorted((n for n in range(low + 1, high) if n not in known), key=lambda n: abs(n - middle))
        if not order:
            break
        found = judge(commits[order[0]])
        if found == GOOD:
            low = order[0]
        elif found == BAD:
            high = order[0]
        else:
            known[order[0]] = found
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
    tell: Callable[[str], None] = lambda text: None,
) -> Culprit:
    """Find the first commit after `good`, up to `bad`, at which `command` exits with 1 or 2.

    Each commit is checked out in a work tree under `work`, where `build` (a shell line) and `command` run. 3, too noisy
    to say, is asked again `retries` times. BisectError if `good` is no ancestor of `bad`, or the ends are not as said.
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
            tell(f"{commit[:10]} {subject}")
            tried[commit] = Tried(commit, subject, *_judge(tree, commit, command, build, retries))
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
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise BisectError(f"git {arguments[0]}: {said}")
    return done.stdout.strip()
