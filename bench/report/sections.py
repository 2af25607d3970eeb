"""The sections of the page: rooflines, time by size, fastest kernels, history. A section without data says why."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from gristmill.bench.history import Series as RowHistory
from gristmill.bench.history import history
from gristmill.bench.report.charts import Axis, Mark, Roof, Series, broken, chart, key, number
from gristmill.bench.report.looks import Looks
from gristmill.bench.report.rows import Files, PageRow, latest, tied
from gristmill.bench.result_file import device_of
from gristmill.kernel_registry.registry import UnknownError, default_registry

BARS = "Bars span the interquartile range of the samples."


def label(row: PageRow) -> str:
    """The accessible name of a mark."""
    return f"{row.series} {row.problem}: {number(row.us)} µs"


def section(name: str, title: str, about: str, body: Sequence[str], empty: str) -> str:
    """A section, or the sentence that says why it is empty."""
    inside = f"<p>{about}</p>{''.join(body)}" if body else f'<p class="empty">{empty}</p>'
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{inside}</section>'


def charts(figures: Sequence[str]) -> list[str]:
    """Charts side by side, as many as fit."""
    return [f'<div class="charts">{"".join(figures)}</div>'] if figures else []


def rooflines(files: Files, rows: Sequence[PageRow], shown: Looks) -> str:
    """One chart per device and operation: throughput against arithmetic intensity, under the ceilings measured there."""
    limits: dict[tuple[str, str], dict[str, Any]] = {}
    for _, data in sorted(files, key=lambda pair: str(pair[1].get("when") or "")):
        for op in {row["op"] for row in data["rows"]} if data.get("ceilings") else ():
            limits[device_of(data), op] = data["ceilings"]
    groups: dict[tuple[str, str], list[PageRow]] = {}
    for row in latest(rows):
        if row.flops and row.bytes and (row.device, row.op) in limits:
            groups.setdefault((row.device, row.op), []).append(row)
    figures = []
    for (device, op), members in groups.items():
        series: dict[str, Series] = {}
        for row in members:
            assert row.flops and row.bytes
            entry = series.setdefault(row.series, Series(row.short, row.series, shown[op, row.series]))
            low, high = (
                (row.flops / row.high / 1e6, row.flops / row.low / 1e6)
                if row.low and row.high
                else (None, None)
            )
            entry.marks.append(
                Mark(row.flops / row.bytes, row.flops / row.us / 1e6, row.number, label(row), low, high)
            )
        figures.append(
            chart(
                op,
                list(series.values()),
                Axis("operations per byte"),
                Axis("TFLOP/s"),
                _roofs(limits[device, op], members),
                device,
            )
        )
    return section(
        "rooflines",
        "Rooflines",
        f"Throughput under the memory and compute ceilings measured on the same device. A provider has the same colour and mark on "
        f"every chart; the fill tells its kernels apart. {BARS}",
        charts(figures),
        "No file contains measured ceilings; <code>kernelbench bench --results</code> writes them.",
    )


def _roofs(limits: dict[str, Any], rows: Sequence[PageRow]) -> list[Roof]:
    """The memory roof over the rows' intensities, at least a decade, and the ceilings of the units they compute in."""
    gbs, rates = limits["read_gbs"], dict(limits["tflops"])
    places = [row.flops / row.bytes for row in rows if row.flops and row.bytes]
    left, right = min(places) / 1.5, max(*places, min(places) * 6) * 1.5
    units = sorted({row.unit for row in rows if row.unit})
    knees = {unit: rates[unit] * 1e3 / gbs for unit in units if unit in rates}
    end = (
        min(right, max(knees.values())) if len(knees) == len(units) else right
    )  # no measured rate: only the memory roof
    roofs = []
    if end > left:
        roofs.append(Roof(f"{gbs:,.0f} GB/s", ((left, left * gbs / 1e3), (end, end * gbs / 1e3)), "slope"))
    for unit, knee in knees.items():
        if knee < right:
            roofs.append(
                Roof(
                    f"{unit} {number(rates[unit])} TFLOP/s",
                    ((max(left, knee), rates[unit]), (right, rates[unit])),
                )
            )
    return roofs


def shapes(rows: Iterable[PageRow]) -> dict[tuple[str, str, str], list[PageRow]]:
    """Rows by device, operation and shape: all that is fixed, and where that leaves several problems of one size, all but
    the size.
    """
    groups: dict[tuple[str, str, str], list[PageRow]] = {}
    for row in latest(rows):
        if row.size is not None:
            groups.setdefault((row.device, row.op, row.static), []).append(row)
    by_shape: dict[tuple[str, str, str], list[PageRow]] = {}
    for (device, op, static), members in groups.items():
        sizes = {(row.size, row.problem) for row in members}
        if len(sizes) == len({size for size, _ in sizes}):
            by_shape[device, op, static] = members
            continue
        bucket = f"{default_registry().op(op).bucket}="
        for row in members:
            fixed_part = ",".join(part for part in row.problem.split(",") if not part.startswith(bucket))
            by_shape.setdefault((device, op, fixed_part), []).append(row)
    return by_shape


def size_name(op: str) -> str:
    """The size axis, with the operation's description."""
    try:
        known = default_registry().op(op)
        return next(f"{axis.name}: {axis.help}" for axis in known.axes if axis.name == known.bucket)
    except (UnknownError, StopIteration):
        return "size"


def latency(rows: Sequence[PageRow], shown: Looks) -> str:
    """Time against batch size: one chart per device, operation and shape, one line per kernel."""
    figures = []
    for (device, op, shape), members in shapes(rows).items():
        sizes = sorted({row.size for row in members if row.size})
        if len(sizes) < 2:
            continue
        series: dict[str, Series] = {}
        for row in sorted(members, key=lambda row: row.size or 0):
            if row.size:
                entry = series.setdefault(
                    row.series, Series(row.short, row.series, shown[op, row.series], joined=True)
                )
                entry.marks.append(Mark(row.size, row.us, row.number, label(row), row.low, row.high))
        ticks = tuple((float(size), f"{size:,}") for size in sizes)
        figures.append(
            chart(
                f"{op} {shape}",
                list(series.values()),
                Axis(size_name(op), ticks),
                Axis("µs per call"),
                about=device,
            )
        )
    return section(
        "latency",
        "Time by size",
        f"Median microseconds per call; lower is better; both axes are logarithmic. {BARS}",
        charts(figures),
        "No operation and shape was measured at two or more sizes.",
    )


def winners(rows: Sequence[PageRow], shown: Looks) -> str:
    """The fastest kernels: one table per device and operation, with a row per shape and a column per size."""
    tables: dict[tuple[str, str], dict[str, dict[int, list[PageRow]]]] = {}
    for (device, op, shape), members in shapes(rows).items():
        for row in members:
            assert row.size is not None
            tables.setdefault((device, op), {}).setdefault(shape, {}).setdefault(row.size, []).append(row)
    sections = []
    for (device, op), by_shape in tables.items():
        if not any(len(cell) > 1 for sizes in by_shape.values() for cell in sizes.values()):
            continue
        sizes = sorted({size for cells in by_shape.values() for size in cells})
        head = "".join(f'<th scope="col">{size:,}</th>' for size in sizes)
        body = "".join(
            f'<tr><th scope="row">{broken(shape or op)}</th>'
            + "".join(_cell(cells.get(size, []), shown) for size in sizes)
            + "</tr>"
            for shape, cells in by_shape.items()
        )
        name = html.escape(f"{op} on {device}")
        sections.append(
            f'<h3>{html.escape(op)}<small>{html.escape(device)}</small></h3><div class="scroll" tabindex="0" role="region" '
            f'aria-label="Fastest, {name}"><table class="map"><thead><tr><th scope="col">shape \\ {html.escape(size_name(op))}</th>'
            f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )
    return section(
        "winners",
        "Fastest, by shape and size",
        "The fastest kernel, and its speedup over the second; a darker cell is a larger speedup. <em>tie</em>: the samples "
        "do not separate the two. <em>alone</em>: no other kernel was measured.",
        sections,
        "No problem was measured with two or more kernels.",
    )


def _cell(rows: Sequence[PageRow], shown: Looks) -> str:
    if not rows:
        return '<td class="none"><span aria-label="not measured">·</span></td>'
    order = sorted(rows, key=lambda row: row.us)
    best = order[0]
    look, kind, tint = shown[best.op, best.series], "", 0.0
    if len(order) == 1:
        lead, kind = "alone", " weak"
    elif tied(order[0], order[1]):
        lead, kind = f"tie with {order[1].short}", " weak"
    else:
        lead = f"{order[1].us / best.us:.2f}×"
        tint = min(34, 8 + 12 * math.log2(order[1].us / best.us))
    return (
        f'<td class="c{look.colour}{kind}" style="--tint:{tint:.0f}%"><button type="button" data-row="{best.number}">{key(look)}'
        f"{html.escape(best.short)}<small>{number(best.us)} µs, {html.escape(lead)}</small></button></td>"
    )


FEW_CHARTS, FEW_CHANGES = 12, 8
"""Charts of rows that did not change, and changes, that are shown at once; more are folded away."""


def _changes(lines: Sequence[str]) -> list[str]:
    """The largest changes, and the others behind a fold."""
    parts = [f'<ul class="changes">{"".join(lines[:FEW_CHANGES])}</ul>'] if lines else []
    if smaller := lines[FEW_CHANGES:]:
        parts.append(
            f"<details><summary>{len(smaller)} smaller {'change' if len(smaller) == 1 else 'changes'}</summary>"
            f'<ul class="changes">{"".join(smaller)}</ul></details>'
        )
    return parts


def past(files: Files, rows: Sequence[PageRow], shown: Looks) -> str:
    """Rows that several files contain, by date, with the changes that the samples support."""
    where = {(row.file, row.op, row.problem, row.series, row.device): row for row in rows}
    groups: dict[tuple[str, str, str], list[RowHistory]] = {}
    for member in history(files):
        if len(member.points) > 1:
            groups.setdefault((member.key[0], member.key[1], member.key[3]), []).append(member)
    changed: list[str] = []
    steady: list[str] = []
    lines: list[tuple[float, str]] = []
    for (op, problem, device), members in groups.items():
        steps = sorted({(p.when, p.file) for member in members for p in member.points})
        series: list[Series] = []
        changes = False
        for member in members:
            name, marks = member.key[2], []
            for point in member.points:
                row = where[point.file, op, problem, name, device]
                note = f"{point.change - 1:+.0%}" if point.change is not None else ""
                text = f"{name} in {point.file} {point.when}: {number(point.us)} µs" + (
                    f", changed {note}" if note else ""
                )
                marks.append(
                    Mark(
                        steps.index((point.when, point.file)) + 1,
                        point.us,
                        row.number,
                        text,
                        row.low,
                        row.high,
                        note,
                    )
                )
                if point.change is not None:
                    changes = True
                    lines.append(
                        (
                            abs(point.change - 1),
                            f'<li><button type="button" data-row="{row.number}"><b>{note}</b> '
                            f"{html.escape(f'{name} {problem}, {point.file}, {device}')}</button></li>",
                        )
                    )
            series.append(Series(name.removeprefix(f"{op}_"), name, shown[op, name], marks, joined=True))
        day = (
            slice(11, 16) if len({when[:10] for when, _ in steps}) == 1 else slice(5, 10)
        )  # the hour, if all are of one day
        ticks = tuple((float(n + 1), when[day] or str(n + 1)) for n, (when, _) in enumerate(steps))
        drawn = chart(
            f"{op} {problem}",
            series,
            Axis("files, by date", ticks, log=False),
            Axis("µs per call"),
            about=device,
        )
        (changed if changes else steady).append(drawn)
    parts = _changes([text for _, text in sorted(lines, reverse=True)])
    if groups and not lines:
        parts.append("<p>Nothing changed.</p>")
    parts += charts(changed)
    if len(steady) > FEW_CHARTS:
        parts.append(
            f"<details><summary>{len(steady)} problems without a change</summary>{''.join(charts(steady))}</details>"
        )
    else:
        parts += charts(steady)
    return section(
        "history",
        "History",
        "Rows that several files contain, by date, not to scale. A ring marks a change of more than 5&nbsp;% that also exceeds the "
        f"spread of the samples on both sides. {BARS}",
        parts,
        "No row is in two or more files, so there is no history.",
    )
