"""linear_int4.svg, the picture of README.md, from a result file. `make generate` writes it; a browser shows it in light and dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "h200" / "linear_weight_only_table.json"
FIGURE = Path(__file__).with_suffix(".svg")
SHAPE = {"scheme": "int4_g128", "n": 28672, "k": 4096, "x": "bf16"}

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 300, 40, 62, 250
BAR, GREATEST = 26, 4.0
STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#16181d}.page{fill:#fff}.title{font-size:16px;font-weight:600}
.dim{fill:#565c68}.ours{fill:#1f5fbf}.peer{fill:#b9a27c}.one{stroke:#a8123e;stroke-width:1.5;stroke-dasharray:5 4}.base{fill:#a8123e}
@media(prefers-color-scheme:dark){text{fill:#e8eaee}.page{fill:#101216}.dim{fill:#a8aeba}.ours{fill:#7fb2ff}.peer{fill:#8f7d5c}
.one{stroke:#ff92ad}.base{fill:#ff92ad}}
"""


def speeds(data: dict[str, Any]) -> list[tuple[int, float, float | None]]:
    """(rows of x, our speed, humming's) over that of cuBLAS in bf16, by the medians of a result file; None: not measured."""
    found = []
    for row in data["rows"]:
        if any(row[name] != value for name, value in SHAPE.items()):
            continue
        for m, of_m in row["m"].items():
            us = {data["names"][place]: median for place, median, *_ in of_m["candidates"]}
            peers = [median for name, median in us.items() if name.startswith("humming")]
            cublas = us["cublas"]
            found.append((int(m), cublas / us[of_m["best"]], cublas / min(peers) if peers else None))
    return sorted(found)


def figure() -> str:
    """The SVG."""
    bars = speeds(json.loads(RESULTS.read_text(encoding="utf-8")))
    described = "; ".join(
        f"{m} rows: {ours:.2f}" + (f", humming {peer:.2f}" if peer else "") for m, ours, peer in bars
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        '<title id="t">int4 linear on an H200, times as fast as cuBLAS in bf16</title>',
        f'<desc id="d">{described}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="26">int4 linear on an H200: times as fast as cuBLAS in bf16</text>',
        f'<rect class="ours" x="{LEFT}" y="36" width="11" height="11"/><text x="{LEFT + 17}" y="46">gristmill</text>',
        f'<rect class="peer" x="{LEFT + 95}" y="36" width="11" height="11"/><text x="{LEFT + 112}" y="46">humming 0.1.19</text>',
        f'<text class="base" x="{LEFT + 235}" y="46">- - cuBLAS, bf16 weights</text>',
        f'<path class="one" d="M{LEFT - 8} {_y(1):.1f}H{WIDTH - LEFT}"/>',
    ]
    step = (WIDTH - 2 * LEFT) / len(bars)
    for place, (m, ours, peer) in enumerate(bars):
        x = LEFT + place * step
        for offset, kind, value in ((0, "ours", ours), (BAR + 2, "peer", peer)):
            if value is not None:
                top = _y(value)
                parts.append(
                    f'<rect class="{kind}" x="{x + offset:.0f}" y="{top:.1f}" width="{BAR}" height="{BOTTOM - top:.1f}"/>'
                    f'<text x="{x + offset + BAR / 2:.0f}" y="{top - 5:.1f}" text-anchor="middle">{value:.1f}</text>'
                )
        parts.append(f'<text class="dim" x="{x + BAR:.0f}" y="{BOTTOM + 18}" text-anchor="middle">{m}</text>')
    parts += [
        f'<text class="dim" x="{LEFT}" y="{BOTTOM + 38}">rows of x; weight {SHAPE["n"]} × {SHAPE["k"]} in groups of 128, cold, '
        "CUDA graphs, medians</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _y(speed: float) -> float:
    return BOTTOM - (BOTTOM - TOP - 14) * speed / GREATEST
