"""What the two command lines share: one-line errors with exit status 2, JSON alone on stdout, tables for people."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gristmill.kernel_registry.registry import UnknownError
from gristmill.kernel_registry.select import NoKernelError

USER_ERRORS = (ValueError, UnknownError, NoKernelError, FileNotFoundError, NotADirectoryError, PermissionError)
"""What a mistaken argument raises anywhere below: shown as one line. Anything else is our bug, with its traceback."""


def run(command: click.Command, name: str) -> None:
    """Run a command line and leave the process: 0, 2 after a user's mistake, 130 after an interrupt."""
    try:
        status = command.main(prog_name=name, standalone_mode=False)
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except click.Abort:
        status = 130
    except click.ClickException as error:
        status = fail(name, error.format_message())
    except USER_ERRORS as error:
        status = fail(name, str(error))
    except BrokenPipeError:
        status = 0
    sys.exit(status if isinstance(status, int) else 0)


def fail(name: str, message: str) -> int:
    """One line on stderr; the exit status of a user's mistake."""
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def emit(value: Any) -> None:
    """JSON alone on stdout; infinities and NaN, which JSON lacks, are null."""
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
    """A table on stdout. right: the columns of numbers."""
    shown = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        shown.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*("" if cell is None else str(cell) for cell in row))
    out().print(shown)


def out() -> Console:
    """Where people read results. Piped output is not cut to the width of a terminal that is not there."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def err() -> Console:
    """Where progress goes."""
    return Console(stderr=True, highlight=False)


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: three significant digits, "-" when unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def progress(items: Sequence[Any], describe: Callable[[Any], str], *, quiet: bool = False) -> Any:
    """Iterate with a progress bar on stderr (none when `quiet`)."""
    if quiet:
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   console=err(), transient=True)  # fmt: skip
    with bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=describe(item))
            yield item
            bar.advance(task)


@contextlib.contextmanager
def status(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on; calling the value changes it. Nothing when `quiet` or piped."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    with err().status("") as line:
        yield lambda text: line.update(text)
