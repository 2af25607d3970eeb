"""Regular expressions from checkpoints, which nobody has vetted: those whose matching could take forever are refused."""

from __future__ import annotations

import re
import re._parser as parser  # type: ignore[import-not-found]
from functools import cache
from typing import Any

from gristmill.quant.formats.contract import FormatError

LONGEST = 4096
"""Characters of an expression: one that lists every layer has some hundred."""
MOST_WAYS = 1 << 24
"""Ways to match a name, for six ``.*`` in a row: a name that fails after all of them takes about a second."""
_LENGTH = 64
"""Characters of the name of a module, for the repeats of what can itself match in several ways."""
_SHARE = 16
"""Ways of one ``.*``: several share the characters of the name, so that each has fewer than there are characters."""


@cache
def expression(text: str, where: str) -> re.Pattern[str]:
    """The expression, compiled.

    Raises:
        FormatError: it is none, it is too long, or a name can be tried in more than `MOST_WAYS` ways, as with (a+)+.
    """
    if len(text) > LONGEST:
        raise FormatError(
            f"{where}: a regular expression of {len(text)} characters, over {LONGEST}: {text[:40]!r}..."
        )
    try:
        ways = _ways(parser.parse(text))
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(f"{where}: {text!r} is no regular expression: {error}") from error
    if ways > MOST_WAYS:
        raise FormatError(
            f"{where}: matching {text!r} could take forever: it has nested repeats, such as (a+)+, or too many"
        )
    return compiled


def _ways(items: Any) -> int:
    """At most how many ways there are through a parsed expression, or part of one; at most `MOST_WAYS` + 1."""
    total = 1
    for op, value in items:
        if op in (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT):
            total *= _repeats(*value)
        elif op is parser.BRANCH:
            total *= sum(map(_ways, value[1]))
        elif isinstance(
            value, tuple | parser.SubPattern
        ):  # a group, a condition, what must stand before or behind
            for part in value if isinstance(value, tuple) else (value,):
                total *= _ways(part) if isinstance(part, parser.SubPattern) else 1
        total = min(total, MOST_WAYS + 1)
    return total


def _repeats(least: int, most: int, items: Any) -> int:
    ways = _ways(items)
    if ways == 1:
        return max(min(most - least + 1, _SHARE), least if items.getwidth()[0] == 0 else 1)
    total, power = 0, 1
    for count in range(min(most, _LENGTH) + 1):
        total += power if count >= min(least, _LENGTH) else 0
        power = min(power * ways, MOST_WAYS + 1)
    return total
