"""kernelbench bisect: find the commit that made a kernel slower, or wrong."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from gristmill import console


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--good", required=True, metavar="REV", help="A good commit.")
@click.option("--bad", default="HEAD", show_default=True, metavar="REV", help="A later, bad commit.")
@click.option(
    "--build",
    metavar="LINE",
    help="A shell line to run at each commit first: cmake --build ..., pip install ...",
)
@click.option(
    "--repository",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=Path(),
    help="Default: here.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.argument("command", nargs=-1, required=True, metavar="COMMAND...")
def bisect(
    good: str, bad: str, build: str | None, repository: Path, as_json: bool, command: tuple[str, ...]
) -> None:
    """Find the first commit at which COMMAND, run in its own checkout, exits with 1 (slower) or 2 (wrong).

    \b
    kernelbench bisect --good v0.1 --build "cmake -S . -B build -G Ninja && cmake --build build" -- \\
        env PYTHONPATH=src python -m gristmill.bench.cli check /tmp/baseline.json

    COMMAND is usually a check against a baseline written at the good commit, so the verdict at every commit is a
    statistical one. After 3 (too noisy) the check is repeated. Commits that cannot be built or judged are skipped; if the
    first bad commit may be among them, all of them are listed.
    """
    from gristmill.bench.bisect import bisect as run

    with (
        tempfile.TemporaryDirectory(prefix="kernelbench-bisect-") as work,
        console.status(quiet=as_json) as progress,
    ):
        culprit = run(repository, good, bad, command, build=build, work=Path(work), progress=progress)
    if as_json:
        console.emit({"suspects": list(culprit.suspects), "tried": [vars(one) for one in culprit.tried]})
        return
    console.table(
        "Tried",
        ["commit", "", "exit", "subject"],
        [[t.commit[:10], t.said, t.status, t.subject] for t in culprit.tried],
    )
    subjects = {one.commit: one.subject for one in culprit.tried}
    print(file=sys.stdout)
    for commit in culprit.suspects:
        console.out().print(
            f"{'first bad' if len(culprit.suspects) == 1 else 'suspect'}: {commit[:10]} {subjects.get(commit, '')}"
        )
