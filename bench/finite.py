"""Numeric options that reject nan, which passes range checks, and inf."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A FloatRange without nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; a usage error if it is not finite."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
