"""The quality table of a result file of `lab.quality`, as Markdown, and its place in a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.kernel_registry.scheme import QuantScheme

BEGIN, END = "<!-- quality-table -->", "<!-- /quality-table -->"
NAMES = {"rtn": "nearest", "gptq": "GPTQ", "awq": "AWQ"}


def render(data: Mapping[str, Any]) -> str:
    """Perplexities, a line for each scheme, a column for each model and method; "-" where a row is missing.

    Below, for each model, the part of round to nearest's loss (over the model as stored, in nats) that remains with int4_g128.
    """
    rows = {(row["model"], row["scheme"], row["method"]): row for row in data["rows"]}
    models = list(dict.fromkeys(model for model, scheme, _ in rows if scheme == "float"))
    head = [
        "format",
        "bits per weight",
        *(f"{model}: {name}" if name == "nearest" else name for model in models for name in NAMES.values()),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for scheme in dict.fromkeys(row["scheme"] for row in data["rows"]):
        cells = [_cell(rows.get((model, scheme, method))) for model in models for method in NAMES]
        name, width = ("as stored", "16") if scheme == "float" else (f"`{scheme}`", f"{bits(scheme):.3g}")
        if scheme == "float":
            cells = ["" if cell == "-" else cell for cell in cells]
        lines.append(f"| {name} | {width} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(_sentence(model, rows) for model in models)])


def _cell(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{row['perplexity']:.3f}"


def _sentence(model: str, rows: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> str:
    plain = rows[model, "float", "rtn"]["loss"]
    lost = {m: rows[model, "int4_g128", m]["loss"] - plain for m in NAMES if (model, "int4_g128", m) in rows}
    parts = [
        f"{NAMES[m]} {value:+.4f}" + (f" ({value / lost['rtn']:.0%})" if m != "rtn" else "")
        for m, value in lost.items()
    ]
    return f"{model} in `int4_g128`, nats per token over the model as stored: {', '.join(parts)}."


def bits(scheme: str) -> float:
    """Bits of a weight with its part of the scales, of a large matrix."""
    import torch

    from gristmill.quant import quantize

    return 8 * quantize(torch.ones(1024, 4096), QuantScheme.parse(scheme)).nbytes / (1024 * 4096)


def into(text: str, table: str) -> str:
    """A document with the table between its marks; ValueError when it has none."""
    for mark in (BEGIN, END):
        if mark not in text:
            raise ValueError(f"the document has no {mark}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
