"""The progress bar of a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gristmill import console


@contextmanager
def bar(description: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; yields a function to call with (done, total)."""
    from rich.progress import Progress

    with Progress(console=console.err(), transient=True, disable=quiet) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
