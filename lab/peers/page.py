"""Tables of result files of `lab.peers`, as Markdown: for the terminal and for docs/performance/peers.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.peers.adapter import peers
from lab.peers.group import groups
from lab.peers.race import INEXACT
from lab.quality_table import into

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance" / "peers.md"
MARK = "peers-table"


def table(data: Mapping[str, Any], problems: Mapping[str, int] | None = None) -> str:
    """A line per group, and one of the peers that are inexact. problems: how many a group has, where not those of the file are meant."""
    lines = [
        "| group | problems compared | ours over the best peer, geometric mean | at most 1.05 | worst | wrong |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for group in data.get("summary", ()):
        compared = f"{group['compared']} of {(problems or {}).get(group['group'], group['cells'])}"
        if (worst := group["worst"]) is None:
            lines.append(f"| {group['group']} | {compared} | - | - | - | {group['wrong']} |")
            continue
        where = f"{worst['ratio']:.2f}: {worst['model']}, `{worst['problem']}`, `{worst['kernel']}` over {worst['peer']}"
        figures = f"{group['mean_ratio']:.2f} | {group['close']:.0%}"
        lines.append(f"| {group['group']} | {compared} | {figures} | {where} | {group['wrong']} |")
    inexact = [
        f"{peer} in {count} of {group['group']}"
        for group in data.get("summary", ())
        for peer, count in group.get("inexact", {}).items()
    ]
    if inexact:
        lines += ["", f"Timed with errors of up to {INEXACT:g} times the tolerance: {', '.join(inexact)}."]
    return "\n".join(lines)


def compared() -> str:
    """The peers, the operations that they are called for, and the groups with their models."""
    lines = ["| peer | distribution | operations |", "|---|---|---|"]
    for peer in peers().values():
        ops = ", ".join(f"`{op}`" for op in dict.fromkeys(adapter.op for adapter in peer.adapters))
        lines.append(f"| {peer.name} | {peer.package} | {ops} |")
    lines += ["", "| group | operation | problems | of |", "|---|---|---:|---|"]
    for group in groups().values():
        cells = list(group.cells)
        models = ", ".join(dict.fromkeys(cell.model for cell in cells))
        lines.append(f"| {group.name} | `{group.op}` | {len(cells)} | {models} |")
    return "\n".join(lines)


def results(root: Path = ROOT) -> str:
    """The tables of all result files; without one, that nothing is measured yet."""
    parts, problems = [], {group.name: len(list(group.cells)) for group in groups().values()}
    for path in sorted((root / "bench" / "results").glob("*/peers*.json")):
        data, name = json.loads(path.read_text(encoding="utf-8")), path.relative_to(root)
        about = data["about"]
        driver = (about["gpu"] or {}).get("driver_version", "none")
        found = ", ".join(f"{peer}: {text}" for peer, text in data["libraries"].items())
        measured = {group["group"] for group in data.get("summary", ())}
        left = [group for group in problems if group not in measured]
        missing = f"\n\nNot measured there: {', '.join(left)}." if left else ""
        runs = [run["command"] for run in data.get("runs", [about])]
        parts.append(
            f"{about['device']}, driver {driver}, torch {about['torch']}, triton {about['triton']}; {found} "
            f"([{name}](../../{name}), `{'`, `'.join(runs)}`).\n\n{table(data, problems)}{missing}"
        )
    return "\n\n".join(parts) or "Not measured yet: there is no result file."


def page() -> str:
    """docs/performance/peers.md with its tables."""
    return into(PAGE.read_text(encoding="utf-8"), f"{compared()}\n\n### Results\n\n{results()}", MARK)
