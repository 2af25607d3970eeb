"""What tests proved of each architecture: the table of supported.md, which ``make generate`` writes from them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

PAGE = Path(__file__).with_name("supported.md")
COLUMNS = ("logits and ids", "quantized", "GGUF", "ranks", "drafts")


@cache
def proven() -> dict[str, dict[str, tuple[str, ...]]]:
    """Architecture -> column -> what was proven, () where nothing was."""
    table = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("| ") and len(cells) == len(COLUMNS) and cells != [*COLUMNS]:
            rows = (tuple(cell.split(", ")) if cell else () for cell in cells)
            table[name] = dict(zip(COLUMNS, rows, strict=True))
    return table
