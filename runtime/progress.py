"""How far loading and warm-up are: a bar on a terminal, and whoever listens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, int], None]
"""Called with a phase, what is done of it, and what there is in all; 0 = not known."""
PHASES = ("weights", "selection", "verification", "compilation", "graphs")
"""The phases in their order."""
_LISTENER = ContextVar[Progress | None]("_LISTENER", default=None)
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
def progress_to(listener: Progress) -> Iterator[None]:
    """Tell a listener, too, in this block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr while the block runs, if that is a terminal. Yields what it and the listener of `progress_to` are told by."""
    listener = _LISTENER.get() or (lambda phase, done, total: None)
    if not bar_is_shown():
        yield listener
        return
    from rich import progress as rich

    from gristmill import console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=console.err(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(phase: str, done: int, total: int) -> None:
            listener(phase, done, total)
            bar.update(task, description=phase, completed=done, total=total or None)

        yield tell
