"""Options that are numbers: neither nan, which no comparison stops, nor inf."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A FloatRange without nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; a mistaken option if it is none."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number
