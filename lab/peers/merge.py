"""Result files of several runs as one: of a cell that several have, the row of the last.

    python -m lab.peers.merge bench/results/h200/peers.json peers_attention.json peers_fp8.json --out bench/results/h200/peers.json

``runs`` of the merged file has what each run says about itself; a row's ``run`` is its place there, 0 if it has none. Runs without a row left are
left out. A row that compares nothing never replaces one that does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from lab.peers.result import ResultFile, cell_of, summaries
from lab.result import write_result


def merged(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the merged file. ValueError: the runs are of different devices, or versions of torch or Triton."""
    rows: dict[str, tuple[dict[str, Any], Mapping[str, Any]]] = {}
    for file in files:
        if changed := ResultFile.differences(files[-1], file):
            raise ValueError(
                f"a run has {', '.join(changed)}; the last one has other versions or another device"
            )
        of_file = file.get("runs", [_run(file)])
        for row in file["rows"]:
            name, run = cell_of(row).name, of_file[row.get("run", 0)]
            if row["ratio"] is not None or name not in rows or rows[name][0]["ratio"] is None:
                rows[name] = ({key: value for key, value in row.items() if key != "run"}, run)
    runs: list[Mapping[str, Any]] = []
    content = []
    for row, run in rows.values():
        if run not in runs:
            runs.append(run)
        place = runs.index(run)
        content.append(row | ({"run": place} if place else {}))
    last = files[-1]
    return {
        "about": last["about"],
        "libraries": last["libraries"],
        "runs": runs,
        "candidates": last["candidates"],
        "trying": None,
        "summary": summaries(content),
        "rows": content,
    }


def _run(file: Mapping[str, Any]) -> dict[str, Any]:
    about = file["about"]
    return {"command": about["command"], "gpu": about["gpu"], "libraries": file["libraries"]}


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="May be one of the files.")
def main(files: tuple[Path, ...], out: Path) -> None:
    """Merge result files of lab.peers, the earliest run first."""
    try:
        data = merged([json.loads(file.read_text(encoding="utf-8")) for file in files])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    write_result(out, data)
    print(f"{len(data['rows'])} cells of {len(data['runs'])} runs")


if __name__ == "__main__":
    main()
