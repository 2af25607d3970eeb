"""Charts as SVG text, without a library: marks are few, the page has to open with no network, and text stays text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48
COLOURS = 8
"""Colours of the page's palette, by number; the ninth series shares the first one's."""


@dataclass(frozen=True)
class Mark:
    """A point. row: the number of the row in the page's table, which a click shows."""

    x: float
    y: float
    row: int
    label: str


@dataclass
class Line:
    """A series of marks. joined: drawn as a line; plain: a line without marks (a roof). colour: number in the palette."""

    name: str
    marks: list[Mark] = field(default_factory=list)
    colour: int = 0
    joined: bool = False
    plain: bool = False
    ringed: frozenset[int] = frozenset()


def chart(title: str, lines: Sequence[Line], x: str, y: str) -> str:
    """A chart with logarithmic axes and a legend. x, y: names of the axes, with units."""
    marks = [mark for line in lines for mark in line.marks]
    across, up = (_Axis([getattr(m, name) for m in marks], size) for name, size in (("x", WIDTH - LEFT - RIGHT), ("y", HEIGHT - TOP - BOTTOM)))
    parts = [f'<figure><figcaption>{html.escape(title)}</figcaption>'
             f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{html.escape(title)}">']  # fmt: skip
    for value in across.ticks():
        at = LEFT + across.place(value)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
                     f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_text(value)}</text>')  # fmt: skip
    for value in up.ticks():
        at = HEIGHT - BOTTOM - up.place(value)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
                     f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_text(value)}</text>')  # fmt: skip
    parts.append(f'<text x="{LEFT + (WIDTH - LEFT - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x)}</text>')
    parts.append(f'<text x="14" y="{TOP + 150}" transform="rotate(-90 14 {TOP + 150})" text-anchor="middle">{html.escape(y)}</text>')
    for line in lines:
        places = [(LEFT + across.place(m.x), HEIGHT - BOTTOM - up.place(m.y)) for m in line.marks]
        kind = "roof" if line.plain else f"c{line.colour % COLOURS}"
        if line.joined or line.plain:
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
            parts.append(f'<path class="line {kind}" d="{path}"/>')
        if line.plain:
            a, b = places[-1]
            parts.append(f'<text x="{a - 4:.1f}" y="{b - 5:.1f}" text-anchor="end">{html.escape(line.name)}</text>')
            continue
        for (a, b), mark in zip(places, line.marks, strict=True):
            ring = ' ring' if mark.row in line.ringed else ""
            parts.append(f'<circle class="{kind}{ring}" cx="{a:.1f}" cy="{b:.1f}" r="4" data-row="{mark.row}">'
                         f"<title>{html.escape(mark.label)}</title></circle>")  # fmt: skip
    parts.append("</svg>" + _legend([line for line in lines if not line.plain]) + "</figure>")
    return "".join(parts)


def _legend(lines: Sequence[Line]) -> str:
    names = {line.name: line.colour % COLOURS for line in lines}
    items = "".join(f'<li><span class="key k{colour}"></span>{html.escape(name)}</li>' for name, colour in names.items())
    return f'<ul class="legend">{items}</ul>'


class _Axis:
    """A logarithmic axis over the values given, in `size` units."""

    def __init__(self, values: Sequence[float], size: float) -> None:
        low, high = min(values), max(values)
        if high / low < 1.5:
            low, high = low / 1.5, high * 1.5
        self.low, self.high, self.size = math.log10(low) - 0.05, math.log10(high) + 0.05, size

    def place(self, value: float) -> float:
        return (math.log10(value) - self.low) / (self.high - self.low) * self.size

    def ticks(self) -> list[float]:
        """Powers of ten, with 2 and 5 where there are few."""
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            found = [s * 10.0**d for d in decades for s in steps if self.low <= math.log10(s * 10.0**d) <= self.high]
            if len(found) >= 3:
                return found[:: -(-len(found) // 9)]
        return found


def _text(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"
