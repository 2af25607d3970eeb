"""Result files as one page that needs no network: rooflines, latency by size, winners, history, a command behind every point."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from gristmill.bench.charts import Line, Mark, chart
from gristmill.bench.history import history
from gristmill.bench.result_file import command, timed
from gristmill.kernel_registry.registry import UnknownError, default_registry

TABLE = ("op", "problem", "kernel", "us", "gbs", "tflops", "of floor", "error", "verdict", "file")


def page(files: Sequence[tuple[str, dict[str, Any]]], title: str = "kernelbench") -> str:
    """The page for (name, content) pairs of result files."""
    rows = [_row(name, data, row) for name, data in files for row in timed(data)]
    for number, row in enumerate(rows):
        row["row"] = number
    colours = {kernel: n for n, kernel in enumerate(sorted({row["kernel"] for row in rows}))}
    parts = [f"<h1>{html.escape(title)}</h1>", _about(files)]
    if rows:
        parts += ["<h2>Rooflines</h2>", *_rooflines(files, rows, colours), *_latency(rows, colours), *_winners(rows)]
        parts += _history(files, rows, colours)
        parts += ["<h2>All rows</h2>", _table(rows)]
    else:
        parts.append("<p>No row of these files has a time.</p>")
    slim = [{k: v for k, v in row.items() if k in ("op", "problem", "kernel", "us", "repro", "file")} for row in rows]
    data = json.dumps(slim, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.format(title=html.escape(title), body="\n".join(parts), data=data, style=_STYLE, script=_SCRIPT)


def _row(name: str, data: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """What the page needs of a row; rates are computed where the file has none."""
    found = {"op": row["op"], "problem": row["problem"], "kernel": row["kernel"], "us": float(row["us"]), "file": name,
             "verdict": row.get("verdict", ""), "error": row.get("error"), "gbs": row.get("gbs"), "tflops": row.get("tflops"),
             "of floor": row.get("fraction_of_floor"), "repro": command(row, data.get("environment", {}).get("target")),
             "bytes": None, "flops": None, "static": row["problem"], "size": None}  # fmt: skip
    try:
        op = default_registry().op(row["op"])
        problem = op.problem(row["problem"])
    except (UnknownError, ValueError):
        return found  # of an operation or an axis of another day: its times still are times
    cost = op.cost(problem)
    found |= {"bytes": cost.bytes, "flops": cost.flops, "static": str(op.static(problem))}
    found["gbs"] = found["gbs"] or cost.bytes / found["us"] / 1e3
    found["tflops"] = found["tflops"] or cost.flops / found["us"] / 1e6
    if op.bucket is not None:
        found["size"] = problem[op.bucket]
    return found


def _label(row: dict[str, Any]) -> str:
    return f"{row['kernel']} {row['problem']}: {row['us']:.4g} us"


def _about(files: Sequence[tuple[str, dict[str, Any]]]) -> str:
    items = []
    for name, data in files:
        env = data.get("environment", {})
        text = ", ".join(str(env[key]) for key in ("device", "target", "toolchain") if env.get(key))
        items.append(f"<li><b>{html.escape(name)}</b> {html.escape(str(data.get('when', '')))} {html.escape(text)}<br>"
                     f"<code>{html.escape(str(env.get('command', '')))}</code></li>")  # fmt: skip
    return f"<ul class='files'>{''.join(items)}</ul>"


def _rooflines(files: Sequence[tuple[str, dict[str, Any]]], rows: list[dict[str, Any]], colours: dict[str, int]) -> list[str]:
    """One chart a file that says its ceilings: arithmetic intensity against the rate reached, under the roofs."""
    found = []
    for name, data in files:
        limits = data.get("ceilings")
        mine = [row for row in rows if row["file"] == name and row["flops"] and row["bytes"]]
        if not limits or not mine:
            continue
        spots = [(row["flops"] / row["bytes"], row) for row in mine]
        lines = [_roof(what, limits["read_gbs"], rate, [x for x, _ in spots]) for what, rate in dict(limits["tflops"]).items()]
        lines += [Line(row["kernel"], [Mark(x, row["tflops"], row["row"], _label(row))], colours[row["kernel"]]) for x, row in spots]
        found.append(chart(f"{name}: rate reached, under {limits['read_gbs']:,.0f} GB/s", lines, "operations a byte", "TFLOP/s"))
    return found or ["<p>No file says its ceilings; those of <code>kernelbench bench --results</code> do.</p>"]


def _roof(what: str, gbs: float, tflops: float, xs: Sequence[float]) -> Line:
    knee = tflops * 1e3 / gbs
    places = sorted({min(*xs, knee), knee, max(*xs, knee) * 1.2})
    marks = [Mark(x, min(x * gbs / 1e3, tflops), -1, "") for x in places]
    return Line(what, marks, plain=True)


def _latency(rows: list[dict[str, Any]], colours: dict[str, int]) -> list[str]:
    """Time against the size of the batch, one chart an operation and shape."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        if row["size"]:
            groups.setdefault((row["op"], row["static"]), {}).setdefault(row["kernel"], []).append(row)
    found = []
    for (op, static), kernels in groups.items():
        if len({row["size"] for members in kernels.values() for row in members}) < 2:
            continue
        lines = []
        for kernel, members in kernels.items():
            members.sort(key=lambda row: row["size"])
            marks = [Mark(row["size"], row["us"], row["row"], _label(row)) for row in members]
            lines.append(Line(kernel, marks, colours[kernel], joined=True))
        found.append(chart(f"{op} {static}", lines, str(default_registry().op(op).bucket), "us a call"))
    return ["<h2>Time by size</h2>", *found] if found else []


def _winners(rows: list[dict[str, Any]]) -> list[str]:
    """Who is fastest, by shape and size, and by how much over the second."""
    cells: dict[tuple[str, str], dict[Any, list[dict[str, Any]]]] = {}
    for row in rows:
        if row["size"]:
            cells.setdefault((row["op"], row["static"]), {}).setdefault(row["size"], []).append(row)
    cells = {key: sizes for key, sizes in cells.items() if any(len({r["kernel"] for r in c}) > 1 for c in sizes.values())}
    if not cells:
        return []
    columns = sorted({size for sizes in cells.values() for size in sizes})
    head = "".join(f'<th scope="col">{size:,}</th>' for size in columns)
    body = []
    for (op, static), sizes in cells.items():
        cols = []
        for size in columns:
            best: dict[str, float] = {}
            for row in sizes.get(size, []):
                best[row["kernel"]] = min(best.get(row["kernel"], row["us"]), row["us"])
            order = sorted(best, key=lambda kernel: best[kernel])
            lead = f"<br><small>{best[order[1]] / best[order[0]]:.2f}x</small>" if len(order) > 1 else ""
            cols.append(f"<td>{html.escape(order[0]) + lead if order else ''}</td>")
        body.append(f'<tr><th scope="row">{html.escape(f"{op} {static}")}</th>{"".join(cols)}</tr>')
    return ["<h2>Fastest, by shape and size</h2>",
            f'<div class="wide" tabindex="0" role="region" aria-label="Fastest kernels"><table><thead><tr><th scope="col">shape</th>{head}'
            f"</tr></thead><tbody>{''.join(body)}</tbody></table></div>"]  # fmt: skip


def _history(files: Sequence[tuple[str, dict[str, Any]]], rows: list[dict[str, Any]], colours: dict[str, int]) -> list[str]:
    """Rows that several files have, in order of their dates; rings mark changes."""
    where = {(row["file"], row["op"], row["problem"], row["kernel"]): row["row"] for row in rows}
    found, groups = [], {}
    for series in history(files):
        if len(series.points) > 1:
            groups.setdefault((series.key[0], series.key[1], series.key[3]), []).append(series)
    for (op, problem, device), members in groups.items():
        lines = []
        for series in members:
            numbers = [where[p.file, op, problem, series.key[2]] for p in series.points]
            marks = [Mark(n + 1, p.us, number, f"{series.key[2]} {p.when}: {p.us:.4g} us"
                          + (f", changed {p.change - 1:+.0%}" if p.change is not None else ""))
                     for n, (p, number) in enumerate(zip(series.points, numbers, strict=True))]  # fmt: skip
            ringed = frozenset(number for p, number in zip(series.points, numbers, strict=True) if p.change is not None)
            lines.append(Line(series.key[2], marks, colours[series.key[2]], joined=True, ringed=ringed))
        found.append(chart(f"{op} {problem} on {device}", lines, "file, by date", "us a call"))
    return ["<h2>History</h2><p>A ring marks a change.</p>", *found] if found else []


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in TABLE)
    body = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(_cell(row[name]))}</td>" for name in TABLE)
        body.append(f'<tr>{cells}<td><button type="button" data-row="{row["row"]}">repro</button></td></tr>')
    return (f'<div class="wide" tabindex="0" role="region" aria-label="All rows"><table><thead><tr>{head}<th scope="col">command</th>'
            f"</tr></thead><tbody>{''.join(body)}</tbody></table></div>")  # fmt: skip


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1a1a1a;--dim:#595959;--rule:#d5d5d5;
--c0:#1f5fbf;--c1:#b3470b;--c2:#1b7a3d;--c3:#8a3ab9;--c4:#a8123e;--c5:#0b7285;--c6:#7a5b00;--c7:#5c5c5c}
@media(prefers-color-scheme:dark){:root{--bg:#141414;--fg:#ececec;--dim:#b0b0b0;--rule:#3a3a3a;
--c0:#7fb2ff;--c1:#ffab70;--c2:#74d394;--c3:#d3a4f5;--c4:#ff92ad;--c5:#66d0e0;--c6:#e0c050;--c7:#bdbdbd}}
*{box-sizing:border-box}body{margin:0 auto;padding:16px;max-width:1248px;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}code,pre{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere;white-space:pre-wrap}
.files{padding-left:1.2em}figure{display:inline-block;vertical-align:top;width:100%;max-width:600px;margin:0 8px 24px 0}
figcaption{font-weight:600;overflow-wrap:anywhere}svg{width:100%;height:auto}svg text{fill:var(--dim);font-size:13px}
.grid{stroke:var(--rule);fill:none}.line{fill:none;stroke-width:1.5}.roof{stroke:var(--dim);stroke-dasharray:5 4}
circle{cursor:pointer}circle.ring{stroke:var(--fg);stroke-width:2.5;r:6px}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 0;padding:0;list-style:none;font-size:13px}
.key{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:5px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}th,td{padding:4px 8px;border-bottom:1px solid var(--rule);text-align:left;
vertical-align:top}th{white-space:nowrap}
button{font:inherit;color:var(--fg);background:transparent;border:1px solid var(--dim);border-radius:4px;cursor:pointer}
#panel{position:sticky;bottom:0;background:var(--bg);border-top:2px solid var(--fg);padding:8px 0;min-height:3.4em}#panel pre{margin:4px 0}
""" + "".join(f"circle.c{n}{{fill:var(--c{n})}}.line.c{n}{{stroke:var(--c{n})}}.k{n}{{background:var(--c{n})}}" for n in range(8))  # fmt: skip

_SCRIPT = """
const rows=JSON.parse(document.getElementById('rows').textContent),panel=document.getElementById('panel');
document.addEventListener('click',e=>{const n=e.target.dataset&&e.target.dataset.row;if(n===undefined)return;const r=rows[n];if(!r)return;
panel.replaceChildren();const b=document.createElement('b'),p=document.createElement('pre');
b.textContent=`${r.kernel} ${r.problem}: ${r.us.toPrecision(4)} us (${r.file})`;p.textContent=r.repro;panel.append(b,p)});
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>
<style>{style}</style></head><body><main>
{body}
<div id="panel" role="status">Choose a point, or a row's button, for the command that measures it again.</div>
</main><script type="application/json" id="rows">{data}</script><script>{script}</script></body></html>
"""
