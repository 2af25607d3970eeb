"""Charts as SVG text, without a library: there are few marks, the page must open without a network, and text remains text.

A chart is about 400 pixels wide, the width of a phone and a third of a desktop window, so its text is legible on both.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gristmill.bench.report.looks import Look
from gristmill.kernel_registry.scheme import cdiv

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 26, 40
LINE = 13
"""Height of a line of text."""

LABELLED = 10
"""Series whose names fit beside a chart; more have a legend below it."""

Place = Callable[[float, float], tuple[float, float]]
"""The position of a data point (x, y) in the drawing."""

LETTERS, LETTER = 19, 6.5
"""The maximum length of a name next to a chart, in letters, and the width of a letter."""


@dataclass(frozen=True)
class Mark:
    """A point.

    Attributes:
        row: the row of the page that a click shows.
        low, high: the ends of its bar.
        note: text next to its ring.
    """

    x: float
    y: float
    row: int
    label: str
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass
class Series:
    """Marks with the same look.

    Attributes:
        name: as drawn.
        title: the full name.
        joined: connected by a line.
    """

    name: str
    title: str
    look: Look
    marks: list[Mark] = field(default_factory=list)
    joined: bool = False


@dataclass(frozen=True)
class Roof:
    """A limit: a line through points (x, y). Its text is at "slope" (along the first segment, if that is long enough) or at "end"."""

    name: str
    points: tuple[tuple[float, float], ...]
    where: str = "end"


@dataclass(frozen=True)
class Axis:
    """An axis: its name with the unit, its ticks (position, text), by default chosen from the values, and whether it is logarithmic."""

    name: str
    ticks: tuple[tuple[float, str], ...] = ()
    log: bool = True


def chart(
    title: str, series: Sequence[Series], x: Axis, y: Axis, roofs: Sequence[Roof] = (), about: str = ""
) -> str:
    """A figure. Joined series are named at their ends if there are few; otherwise there is a legend."""
    beside = len(series) <= LABELLED and all(entry.joined for entry in series)
    right = RIGHT + (min(LETTERS, max(len(entry.name) for entry in series)) * LETTER + 10 if beside else 0)
    marks = [mark for entry in series for mark in entry.marks]
    limits = [point for roof in roofs for point in roof.points]
    across = _Scale([m.x for m in marks] + [p[0] for p in limits], x, WIDTH - LEFT - right)
    ends = [end for m in marks for end in (m.y, m.low, m.high) if end]
    up = _Scale(ends + [p[1] for p in limits], y, HEIGHT - TOP - BOTTOM)

    def place(at: float, value: float) -> tuple[float, float]:
        return LEFT + across.place(at), HEIGHT - BOTTOM - up.place(value)

    parts = [_frame(x, y, across, up, WIDTH - right), *(_roof(roof, place) for roof in roofs)]
    for entry in series:
        parts.append(_series(entry, place))
    if beside:
        parts.append(_names(series, place, WIDTH - right))
    caption = broken(title) + (f"<small>{html.escape(about)}</small>" if about else "")
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{drawing}{'' if beside else legend(series)}</figure>"


def legend(series: Sequence[Series]) -> str:
    """Names of series with their marks."""
    return f'<ul class="legend">{"".join(f"<li>{key(entry.look)}{html.escape(entry.name)}</li>" for entry in series)}</ul>'


def key(look: Look) -> str:
    """A single mark, for legends and tables."""
    return f'<svg class="key" viewBox="-6 -6 12 12" aria-hidden="true"><path class="mark {look.classes}" d="M0 0{look.outline}"/></svg>'


def _frame(x: Axis, y: Axis, across: _Scale, up: _Scale, edge: float) -> str:
    """Grid, numbers and names of the axes; the plot ends at `edge`."""
    bottom, parts = HEIGHT - BOTTOM, []
    for value, text in across.ticks():
        at = LEFT + across.place(value)
        parts.append(
            f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/><text x="{at:.1f}" y="{bottom + 15}" class="mid">{text}</text>'
        )
    for value, text in up.ticks():
        at = bottom - up.place(value)
        parts.append(
            f'<path class="grid" d="M{LEFT} {at:.1f}H{edge:.1f}"/><text x="{LEFT - 6}" y="{at + 4:.1f}" class="end">{text}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{edge:.1f}"/>')
    parts.append(f'<text x="{edge:.1f}" y="{HEIGHT - 6}" class="end name">{html.escape(x.name)}</text>')
    parts.append(f'<text x="4" y="12" class="name">{html.escape(y.name)}</text>')
    return "".join(parts)


def _roof(roof: Roof, place: Place) -> str:
    points = [place(*point) for point in roof.points]
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    (x0, y0), (x1, y1) = points[0], points[1]
    if roof.where == "slope" and math.hypot(x1 - x0, y1 - y0) < len(roof.name) * LETTER:
        text = f'<text x="{x0 + 6:.1f}" y="{y0 + 14:.1f}">{html.escape(roof.name)}</text>'
    elif roof.where == "slope":
        angle, a, b = math.degrees(math.atan2(y1 - y0, x1 - x0)), (x0 + x1) / 2, (y0 + y1) / 2
        text = f'<text transform="translate({a:.1f} {b - 5:.1f}) rotate({angle:.1f})" class="mid">{html.escape(roof.name)}</text>'
    else:
        a, b = points[-1]
        text = f'<text x="{a:.1f}" y="{b - 5:.1f}" class="end">{html.escape(roof.name)}</text>'
    return f'<path class="roof" d="{path}"/>{text}'


def _series(series: Series, place: Place) -> str:
    classes, shape, parts = series.look.classes, series.look.outline, []
    spots = [place(mark.x, mark.y) for mark in series.marks]
    if series.joined and len(spots) > 1:
        parts.append(f'<path class="line {classes}" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in spots)}"/>')
    for mark, (a, b) in zip(series.marks, spots, strict=True):
        if mark.low and mark.high:
            (_, low), (_, high) = place(mark.x, mark.low), place(mark.x, mark.high)
            parts.append(f'<path class="bar c{series.look.colour}" d="M{a:.1f} {low:.1f}V{high:.1f}"/>')
        if mark.note:
            parts.append(
                f'<circle class="ring" cx="{a:.1f}" cy="{b:.1f}" r="8"/>'
                f'<text x="{a - 8:.1f}" y="{max(b - 8, TOP + 9):.1f}" class="end note">{html.escape(mark.note)}</text>'
            )
        parts.append(
            f'<path class="mark {classes}" d="M{a:.1f} {b:.1f}{shape}" data-row="{mark.row}" role="button" tabindex="-1">'
            f"<title>{html.escape(mark.label)}</title></path>"
        )
    return "".join(parts)


def _names(series: Sequence[Series], place: Place, edge: float) -> str:
    """The names of the series, right of the plot, at the heights of their last marks, moved apart if they would overlap."""
    ends = sorted(
        ((place(entry.marks[-1].x, entry.marks[-1].y), entry) for entry in series), key=lambda end: end[0][1]
    )
    heights = spread([spot[1] for spot, _ in ends], TOP + 4, HEIGHT - BOTTOM)
    parts = []
    for ((a, b), entry), height in zip(ends, heights, strict=True):
        name = entry.name if len(entry.name) <= LETTERS else entry.name[: LETTERS - 1] + "…"
        if edge - a > 12 or abs(height - b) > 4:
            parts.append(f'<path class="lead" d="M{a + 5:.1f} {b:.1f}L{edge + 6:.1f} {height:.1f}"/>')
        parts.append(
            f'<text x="{edge + 8:.1f}" y="{height + 4:.1f}" class="direct c{entry.look.colour}">{html.escape(name)}'
            f"<title>{html.escape(entry.title)}</title></text>"
        )
    return "".join(parts)


def spread(heights: Sequence[float], low: float, high: float) -> list[float]:
    """Ascending heights, moved as little as necessary to be a line apart, between low and high if they fit."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + LINE if placed else low))
    over = placed[-1] - high if placed else 0.0
    for number in range(len(placed) - 1, -1, -1):
        if over <= 0:
            break
        placed[number] -= over
        over = placed[number - 1] + LINE - placed[number] if number else 0.0
    return placed


class _Scale:
    """Positions on an axis of length `size` that contains the given values."""

    def __init__(self, values: Sequence[float], axis: Axis, size: float) -> None:
        low, high = min(values), max(values)
        self.axis, self.size = axis, size
        if axis.log:
            if high / low < 1.5:
                low, high = low / 1.5, high * 1.5
            low, high = math.log10(low), math.log10(high)
        pad = 0.05 * (high - low) or 0.5
        self.low, self.high = low - pad, high + pad

    def _number(self, value: float) -> float:
        return math.log10(value) if self.axis.log else value

    def place(self, value: float) -> float:
        return (self._number(value) - self.low) / (self.high - self.low) * self.size

    def ticks(self) -> list[tuple[float, str]]:
        """The given ticks whose texts fit; else powers of ten, with 2 and 5 between them if there are few."""
        if self.axis.ticks:
            return self._room(self.axis.ticks)
        values: list[float] = []
        for steps in (
            (1,),
            (1, 3),
            (1, 2, 5),
            (1, 1.5, 2, 3, 4, 5, 6, 8),
            tuple(n / 10 for n in range(10, 100)),
        ):
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [
                s * 10.0**d
                for d in decades
                for s in steps
                if self.low <= math.log10(s * 10.0**d) <= self.high
            ]
            if len(values) >= 3:
                break
        return [(value, _tick(value)) for value in values[:: cdiv(len(values), 7)]]

    def _room(self, ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
        ticks_that_fit: list[tuple[float, str]] = []
        for value, text in ticks:
            before = ticks_that_fit[-1] if ticks_that_fit else None
            if (
                before is None
                or self.place(value) - self.place(before[0]) >= (len(text) + len(before[1])) / 2 * LETTER + 6
            ):
                ticks_that_fit.append((value, text))
        return ticks_that_fit


def _tick(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def number(value: float) -> str:
    """A measurement as text: three significant digits, with thousands separators."""
    return f"{value:,.0f}" if 999.5 <= value < 1e6 else f"{value:#.3g}".rstrip(".") if value else "0"


def broken(text: str) -> str:
    """Text as HTML with line breaks allowed after commas only, so that an axis and its value stay together."""
    return html.escape(text).replace(",", ",<wbr>")
