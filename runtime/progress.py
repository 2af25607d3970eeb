"""A progress bar of loading and warm-up, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_HIDDEN = ContextVar("_HIDDEN", default=False)


@contextmanager
def no_bar() -> Iterator[None]:
    """Show no bar in this block: the program shows its own, or nothing."""
    token = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(token)


def is_quiet() -> bool:
    """Whether `no_bar` is in force."""
    return _HIDDEN.get()


def bar_is_shown() -> bool:
    """Whether a bar would be shown here: stderr is a terminal, and nobody said `no_bar`."""
    return not is_quiet() and sys.stderr.isatty()


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while the block runs, if that is a terminal. Yields a `Progress`."""
    if not bar_is_shown():
        yield lambda phase, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gristmill import console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console.err(), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda phase, done, total: bar.update(
            task, description=phase, completed=done, total=total or None
        )
