"""Result files as one page that needs no network: rooflines, time by size, fastest kernels, history, and for every point
the command that reproduces it.
"""

from __future__ import annotations

import html
import json
from importlib import resources

from gristmill.bench.report import sections
from gristmill.bench.report.charts import broken, key, number
from gristmill.bench.report.looks import COLOURS, Look, Looks, looks
from gristmill.bench.report.rows import Files, PageRow, page_rows
from gristmill.bench.result_file import device_of, timed

COLUMNS = (
    "command",
    "operation",
    "problem",
    "kernel",
    "µs per call",
    "spread",
    "GB/s",
    "TFLOP/s",
    "of floor",
    "error",
    "verdict",
    "file",
)
FEW_FILES = 4
"""Number of files that are listed directly; more are collapsed."""

NUMBERS = frozenset(COLUMNS[4:10])


def page(files: Files, title: str = "kernelbench") -> str:
    """The page for (name, content) pairs of result files."""
    rows = page_rows(files)
    shown = looks(rows)
    parts = {
        "Files": _about(files),
        "Rooflines": sections.rooflines(files, rows, shown),
        "Time by size": sections.latency(rows, shown),
        "Fastest": sections.winners(rows, shown),
        "History": sections.past(files, rows, shown),
        "All rows": _table(rows, shown) + _untimed(files),
    }
    names = ("files", "rooflines", "latency", "winners", "history", "rows")
    links = "".join(f'<a href="#{name}">{text}</a>' for name, text in zip(names, parts, strict=True))
    data = json.dumps([_shown(row) for row in rows], separators=(",", ":"), ensure_ascii=False).replace(
        "<", "\\u003c"
    )
    colours = "".join(f".c{n}{{--c:var(--c{n})}}" for n in range(COLOURS))
    return _PAGE.format(
        title=html.escape(title),
        summary=html.escape(_summary(files, rows)),
        links=links,
        body="\n".join(parts.values()),
        data=data,
        style=_asset("page.css") + colours,
        script=_asset("page.js"),
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _shown(row: PageRow) -> dict[str, object]:
    """The entries of the panel for a row; unknown values are left out."""
    spread = f"{number(row.low)} to {number(row.high)} µs" if row.low and row.high else None
    entries = {
        "kernel": row.series,
        "op": row.op,
        "problem": row.problem,
        "time": f"{number(row.us)} µs per call",
        "timed": row.timing,
        "interquartile range": spread,
        **{name: f"{number(us)} µs" for name, us in row.others.items()},
        "speedup": row.speedup and f"{row.speedup[1]:.2f}× {row.speedup[0]}",
        "rate": row.tflops and f"{number(row.tflops)} TFLOP/s",
        "memory": row.gbs and f"{number(row.gbs)} GB/s",
        "of floor": row.floor and _share(row),
        "error": row.error is not None and number(row.error),
        "verdict": row.verdict,
        "device": row.device,
        "file": row.file,
        "measured": row.when.replace("T", " ")[:16],
        "repro": row.repro,
    }
    return {name: value for name, value in entries.items() if value}


def _summary(files: Files, rows: list[PageRow]) -> str:
    days = sorted({str(data["when"])[:10] for _, data in files if data.get("when")})
    devices = sorted({device_of(data) for _, data in files})
    parts = [
        f"{len(rows):,} measured {'row' if len(rows) == 1 else 'rows'}",
        f"{len(files)} {'file' if len(files) == 1 else 'files'}",
        ", ".join(devices),
    ]
    if days:
        parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return " · ".join(parts)


def _about(files: Files) -> str:
    """The origin of every file."""
    items = []
    for name, data in files:
        env = data.get("environment", {})
        facts = [
            str(data.get("when") or "no date").replace("T", " ")[:16],
            device_of(data),
            str(env.get("toolchain") or ""),
            f"{len(timed(data))} of {len(data['rows'])} rows timed",
        ]
        command = f"<code>{html.escape(str(env['command']))}</code>" if env.get("command") else ""
        items.append(
            f"<li><b>{html.escape(name)}</b> {html.escape(' · '.join(filter(None, facts)))}{command}</li>"
        )
    unfolded = " open" if len(files) <= FEW_FILES else ""
    return (
        f'<section id="files" aria-labelledby="files-title"><h2 id="files-title">Files</h2><details{unfolded}>'
        f"<summary>{len(files)} result {'file' if len(files) == 1 else 'files'}</summary>"
        f'<ul class="files">{"".join(items)}</ul></details></section>'
    )


def _table(rows: list[PageRow], shown: Looks) -> str:
    head = "".join(
        f'<th scope="col"{" class=number" if name in NUMBERS else ""}>{name}</th>' for name in COLUMNS
    )
    body = "".join(_line(row, shown[row.op, row.series]) for row in rows)
    table = (
        f'<label class="filter">Filter <input type="search" id="filter" placeholder="kernel, problem, file …"></label> '
        f'<span id="count" role="status"></span><div class="scroll" tabindex="0" role="region" aria-label="All rows"><table id="all">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return sections.section(
        "rows",
        "All rows",
        "Spread: interquartile range over median of the samples. Of floor: the least time for bytes, arithmetic and launch, "
        "divided by the measured time. Click a column heading to sort.",
        [table] if rows else [],
        "No row of these files has a time.",
    )


def _line(row: PageRow, look: Look) -> str:
    spread = (row.high - row.low) / row.us if row.low and row.high else None
    numbers = [
        (row.us, number(row.us)),
        (spread, spread is not None and f"{spread:.1%}"),
        (row.gbs, row.gbs and number(row.gbs)),
        (row.tflops, row.tflops and number(row.tflops)),
        (row.floor, row.floor and _share(row)),
        (row.error, row.error is not None and number(row.error)),
    ]
    cells = [
        f'<td><button type="button" data-row="{row.number}" aria-label="command of row {row.number}">command</button></td>'
        f"<td>{html.escape(row.op)}</td><td>{broken(row.problem)}</td><td>{key(look)}{html.escape(row.series)}</td>"
    ]
    cells += [
        f'<td class="number" data-value="{value:.6g}">{text}</td>'
        if value is not None
        else '<td class="number"></td>'
        for value, text in numbers
    ]
    cells.append(f"<td>{html.escape(row.verdict)}</td><td>{html.escape(row.file)}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _share(row: PageRow) -> str:
    """The share of the floor; above 100 %, with the note that the floor was measured too high."""
    return f"{row.floor:.0%}" + (" (above its floor: measured too high)" if (row.floor or 0) > 1 else "")


def _untimed(files: Files) -> str:
    """Rows without a time, and the reason why a kernel is missing from a chart."""
    lines = [
        f"<tr><td>{html.escape(str(row['op']))}</td><td>{broken(str(row['problem']))}</td><td>{html.escape(str(row['kernel']))}</td>"
        f"<td>{html.escape(str(row.get('verdict') or ''))}</td><td>{html.escape(str(row.get('reason') or 'no reason given'))}</td>"
        f"<td>{html.escape(name)}</td></tr>"
        for name, data in files
        for row in data["rows"]
        if not row.get("us")
    ]
    if not lines:
        return ""
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("operation", "problem", "kernel", "verdict", "why", "file")
    )
    return (
        f'<details><summary>{len(lines):,} {"row has" if len(lines) == 1 else "rows have"} no time</summary><div class="scroll" tabindex="0" '
        f'role="region" aria-label="Rows without a time"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        "</div></details>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>{style}</style></head><body>
<header><h1>{title}</h1><p>{summary}</p><nav aria-label="Sections">{links}</nav></header>
<main>
{body}
</main>
<aside id="panel" aria-label="Selected row" hidden><div id="details" role="status"></div></aside>
<noscript><p>Scripts are off: <code>kernelbench repro FILE ROW</code> prints the command of a row.</p></noscript>
<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>
"""
