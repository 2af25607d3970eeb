"""Options that several commands have."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from gristmill.bench.out_file import OutFile

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Finite(click.FloatRange):
    """A FloatRange without nan, which passes range checks, and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; a usage error if it is not finite."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


target = click.option(
    "--target", metavar="T", help="A device of this machine, or a CPU level such as cpu:avx2."
)
described_target = click.option(
    "--target", metavar="T", help="A device: sm_121, h200, gfx942, cpu:avx2 ... Default: this machine."
)
as_json = click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
hot = click.option(
    "--hot", is_flag=True, help="Arguments stay in the cache. Default: every call reads them from memory."
)
seconds = click.option(
    "--seconds",
    type=Finite(0.1),
    default=30.0,
    show_default=True,
    help="A problem gets no more rounds after this time.",
)


def min_effect(default: float | None, what: str, shown: str | bool = True) -> Decorator:
    """--min-effect, a fraction between 0 and 1, described by `what`."""
    between = Finite(0, 1, min_open=True, max_open=True)
    return click.option("--min-effect", type=between, default=default, show_default=shown, help=what)


def minutes(what: str) -> Decorator:
    """--minutes, a time budget."""
    return click.option(
        "--minutes", type=Finite(0, min_open=True), default=10.0, show_default=True, help=what
    )


def spare_processors() -> int:
    """As many child processes as compile beside one that measures: the processors of this process but two, 2 to 16."""
    return max(2, min(16, len(os.sched_getaffinity(0)) - 2))


def workers(default: int = 2, what: str = "Child processes that compile and verify.") -> Decorator:
    """--workers, a number of child processes."""
    return click.option("--workers", type=click.IntRange(1), default=default, show_default=True, help=what)


def results(what: str = "Write a result file with samples.") -> Decorator:
    """--results, the path of a result file."""
    return click.option("--results", type=OutFile(), metavar="FILE", help=what)


def gathered(name: str, names: tuple[str, ...], make: Callable[..., Any], *options: Decorator) -> Decorator:
    """The decorator that adds `options` to a command, as its first ones, and passes it their values, `names`, as one argument:
    ``name=make(**values)``."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def gathering(*arguments: Any, **values: Any) -> Any:
            made = make(**{one: values.pop(one) for one in names})
            return command(*arguments, **values, **{name: made})

        wrapped: Callable[..., Any] = wraps(command)(gathering)
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorate
