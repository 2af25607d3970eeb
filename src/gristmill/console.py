"""What the two command lines share: exit statuses, one-line errors, JSON alone on stdout, tables for people."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gristmill.autotune.errors import UnverifiableError
from gristmill.kernel_registry.registry import UnknownError
from gristmill.kernel_registry.select import NoKernelError

USER_ERRORS = (ValueError, UnknownError, NoKernelError, UnverifiableError, OSError)
"""What a mistaken argument, a problem larger than the memory, a file or a full disk raises anywhere below: shown as one line.
Anything else is our bug, with its traceback."""

CRASHED, INTERRUPTED, READER_GONE = 70, 130, 141
"""Exit statuses that no command gives a meaning of its own: 1 is a verdict of several, so a bug must not end with it."""


def run(command: click.Command, name: str) -> None:
    """Run a command line and leave the process: the command's status, 2 after a user's mistake, and the three above."""
    warnings.showwarning = lambda message, *_: print(
        f"{name}: warning: {' '.join(str(message).split())}", file=sys.stderr
    )
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller closed it
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115  (until the process ends)
    try:
        status = command.main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except click.Abort:
        print(f"{name}: interrupted", file=sys.stderr)
        status = INTERRUPTED
    except click.ClickException as error:
        status = fail(name, error.format_message())
    except (SystemExit, BrokenPipeError):
        # click and rich raise these when stdout is closed. What is still buffered must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = READER_GONE
    except USER_ERRORS as error:
        status = fail(name, _words(error))
    except Exception:
        traceback.print_exc()
        status = CRASHED
    sys.exit(status if isinstance(status, int) else 0)


def _words(error: Exception) -> str:
    """An error without its number: of the operating system's, which file and what."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


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


FOLDED = 16
"""A column of text is not folded to less than so many characters; a column of numbers never is."""


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = ()
) -> None:
    """A table on stdout; where the terminal is too narrow for it, a paragraph a row. `right` names the columns of numbers."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    where = out()
    widths = [max(map(len, texts)) for texts in zip(columns, *cells, strict=True)]
    least = [
        width if name in right else min(width, FOLDED) for name, width in zip(columns, widths, strict=True)
    ]
    if sum(least) + 2 * (len(least) - 1) > where.width:
        _paragraphs(where, title, columns, cells)
        return
    if title:
        where.print(title, style="italic")  # not the table's own, which folds it to the table's width
    shown = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        shown.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=column in right
        )
    for row in cells:
        shown.add_row(*row)
    where.print(shown)


Cell = str | Callable[[Any], Any]


def table_of(title: str, rows: Sequence[Any], columns: Mapping[str, Cell], right: Sequence[str] = ()) -> None:
    """A table of dictionaries. `columns` maps a heading to the key of its values, or to a function of a row; floats and what is unknown in a
    column on the right are written by `number`.
    """

    def cell(row: Any, heading: str, source: Cell) -> Any:
        value = row[source] if isinstance(source, str) else source(row)
        return number(value) if isinstance(value, float) or (value is None and heading in right) else value

    table(
        title, [*columns], [[cell(row, *column) for column in columns.items()] for row in rows], right=right
    )


def _paragraphs(where: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if title:
        where.print(title, style="italic")
    width = max(map(len, columns))
    for row in rows:
        where.print()
        for column, cell in zip(columns, row, strict=True):
            if cell:
                where.print(f"{column:{width}}  {cell}")


def out() -> Console:
    """Where people read results, as it is: brackets are no markup. Piped output is not cut to the width of a terminal that is not
    there."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def err() -> Console:
    """Where progress goes."""
    return Console(stderr=True, highlight=False, markup=False)


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

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err(),
        transient=True,
    )
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
