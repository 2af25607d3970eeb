"""Charts as SVG text, without a library: marks are few, the page has to open with no network, and text stays text.

A chart is drawn for about 400 pixels, which is a phone's width and a third of a desk's, so its text is legible on both.
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
"""Where in the drawing a point (x, y) is."""

LETTERS, LETTER = 19, 6.5
"""Letters of a name beside a chart, and the width of one."""


@dataclass(frozen=True)
class Mark:
    """A point. row: the row of the page that a click shows; low, high: ends of its bar; note: text drawn beside its ring."""

    x: float
    y: float
    row: int
    label: str
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass
class Series:
    """Marks that are drawn alike. name: as drawn; title: in full. joined: connected by a line."""

    name: str
    title: str
    look: Look
    marks: list[Mark] = field(default_factory=list)
    joined: bool = False


@dataclass(frozen=True)
class Roof:
    """A limit: a line through points (x, y), with a text at a place of it ("slope": along its first piece where that is long enough, "end")."""

    name: str
    points: tuple[tuple[float, float], ...]
    where: str = "end"


@dataclass(frozen=True)
class Axis:
    """name: with its unit. ticks: (place, text), chosen by the values where none are given. log: logarithmic."""

    name: str
    ticks: tuple[tuple[float, str], ...] = ()
    log: bool = True


def chart(
    title: str, series: Sequence[Series], x: Axis, y: Axis, roofs: Sequence[Roof] = (), about: str = ""
) -> str:
    """A figure. Series that are joined are named at their ends as long as they are few, the others in a legend."""
    beside = len(series) <= LABELLED and all(one.joined for one in series)
    right = RIGHT + (min(LETTERS, max(len(one.name) for one in series)) * LETTER + 10 if beside else 0)
    marks = [mark for one in series for mark in one.marks]
    limits = [point for roof in roofs for point in roof.points]
    across = _Scale([m.x for m in marks] + [p[0] for p in limits], x, WIDTH - LEFT - right)
    ends = [end for m in marks for end in (m.y, m.low, m.high) if end]
    up = _Scale(ends + [p[1] for p in limits], y, HEIGHT - TOP - BOTTOM)

    def place(at: float, value: float) -> tuple[float, float]:
        return LEFT + across.place(at), HEIGHT - BOTTOM - up.place(value)

    parts = [_frame(x, y, across, up, WIDTH - right), *(_roof(roof, place) for roof in roofs)]
    for one in series:
        parts.append(_series(one, place))
    if beside:
        parts.append(_names(series, place, WIDTH - right))
    caption = broken(title) + (f"<small>{html.escape(about)}</small>" if about else "")
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{drawing}{'' if beside else legend(series)}</figure>"


def legend(series: Sequence[Series]) -> str:
    """Names of series with their marks."""
    return f'<ul class="legend">{"".join(f"<li>{key(one.look)}{html.escape(one.name)}</li>" for one in series)}</ul>'


def key(look: Look) -> str:
    """A single mark, for legends and tables."""
    return f'<svg class="key" viewBox="-6 -6 12 12" aria-hidden="true"><path class="mark {look.classes}" d="M0 0{look.outline}"/></svg>'


def _frame(x: Axis, y: Axis, across: _Scale, up: _Scale, edge: float) -> str:
    """Grid, numbers and names of the axes. edge: where the plot ends on the right."""
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


def _series(one: Series, place: Place) -> str:
    classes, shape, parts = one.look.classes, one.look.outline, []
    spots = [place(mark.x, mark.y) for mark in one.marks]
    if one.joined and len(spots) > 1:
        parts.append(f'<path class="line {classes}" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in spots)}"/>')
    for mark, (a, b) in zip(one.marks, spots, strict=True):
        if mark.low and mark.high:
            (_, low), (_, high) = place(mark.x, mark.low), place(mark.x, mark.high)
            parts.append(f'<path class="bar c{one.look.colour}" d="M{a:.1f} {low:.1f}V{high:.1f}"/>')
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
    """The series' names right of the plot, at the heights of their last marks, moved apart where they would meet."""
    ends = sorted(
        ((place(one.marks[-1].x, one.marks[-1].y), one) for one in series), key=lambda end: end[0][1]
    )
    heights = spread([spot[1] for spot, _ in ends], TOP + 4, HEIGHT - BOTTOM)
    parts = []
    for ((a, b), one), height in zip(ends, heights, strict=True):
        name = one.name if len(one.name) <= LETTERS else one.name[: LETTERS - 1] + "…"
        if edge - a > 12 or abs(height - b) > 4:
            parts.append(f'<path class="lead" d="M{a + 5:.1f} {b:.1f}L{edge + 6:.1f} {height:.1f}"/>')
        parts.append(
            f'<text x="{edge + 8:.1f}" y="{height + 4:.1f}" class="direct c{one.look.colour}">{html.escape(name)}'
            f"<title>{html.escape(one.title)}</title></text>"
        )
    return "".join(parts)


def spread(heights: Sequence[float], low: float, high: float) -> list[float]:
    """Ascending heights, moved as little as keeps them a line apart, between low and high where they fit."""
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
    """Places on an axis `size` long that holds the values given."""

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
        """Those given, as far as their texts have room; else powers of ten, with 2 and 5 between where they are few."""
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
        kept: list[tuple[float, str]] = []
        for value, text in ticks:
            before = kept[-1] if kept else None
            if (
                before is None
                or self.place(value) - self.place(before[0]) >= (len(text) + len(before[1])) / 2 * LETTER + 6
            ):
                kept.append((value, text))
        return kept


def _tick(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def number(value: float) -> str:
    """A measurement for people: three digits that count, thousands apart."""
    return f"{value:,.0f}" if 999.5 <= value < 1e6 else f"{value:#.3g}".rstrip(".") if value else "0"


def broken(text: str) -> str:
    """Text as HTML that may be broken after its commas, so that an axis and its value stay together."""
    return html.escape(text).replace(",", ",<wbr>")
