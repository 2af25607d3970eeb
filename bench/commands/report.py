"""kernelbench report: result files as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.bench import options, result_file
from gristmill.bench.out_file import OutFile


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE..."
)
@click.option("--html", "out", required=True, type=OutFile(), metavar="PAGE", help="The page to write.")
@click.option("--title", default="kernelbench", show_default=True, help="Title of the page.")
@options.as_json
def report(files: tuple[Path, ...], out: Path, title: str, as_json: bool) -> None:
    """Write result files as one HTML page that needs no network: rooflines with the measured ceilings, time by size,
    the fastest kernel by shape and size, history with its changes, and for every point the command that reproduces it.
    """
    from gristmill.bench.report.page import page

    data = [(path.name, result_file.read(path)) for path in files]
    text = page(data, title)
    result_file.replace(out, text)
    answer: dict[str, Any] = {
        "page": str(out),
        "bytes": len(text.encode()),
        "rows": sum(len(result_file.timed(d)) for _, d in data),
    }
    if as_json:
        console.emit(answer)
    else:
        console.out().print(f"{out}: {answer['rows']} rows, {answer['bytes'] / 1e6:.2f} MB")
