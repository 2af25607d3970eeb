"""The quality table of a result file of `gristmill.bench.quality`, as Markdown, and its place in a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.kernel_registry.scheme import QuantScheme

BEGIN, END = "<!-- quality-table -->", "<!-- /quality-table -->"
NAMES = {"rtn": "nearest", "gptq": "GPTQ", "awq": "AWQ"}


def render(data: Mapping[str, Any]) -> str:
    """One line a model and scheme: what each method loses on the float model, nats a token, and the best perplexity."""
    rows = data["rows"]
    floats = {row["model"]: row for row in rows if row["scheme"] == "float"}
    methods = [method for method in NAMES if any(row["method"] == method and row["scheme"] != "float" for row in rows)]
    head = ["model", "format", "bits a weight", *(NAMES[m] for m in methods), "perplexity"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for model, plain in floats.items():
        lines.append(f"| {model} | as stored | 16 |" + " |" * len(methods) + f" {plain['perplexity']:.3f} |")
        schemes = dict.fromkeys(row["scheme"] for row in rows if row["model"] == model and row["scheme"] != "float")
        for scheme in schemes:
            found = {row["method"]: row for row in rows if (row["model"], row["scheme"]) == (model, scheme)}
            lost = [f"{found[m]['loss'] - plain['loss']:+.4f}" if m in found else "" for m in methods]
            best = min(row["perplexity"] for row in found.values())
            lines.append(f"| {model} | `{scheme}` | {bits(scheme):.3g} | " + " | ".join(lost) + f" | {best:.3f} |")
    return "\n".join(lines)


def bits(scheme: str) -> float:
    """Bits of a weight with its part of the scales, of a large matrix."""
    import torch

    from gristmill.quant import QuantTensor, quantize

    made: QuantTensor = quantize(torch.ones(1024, 4096), QuantScheme.parse(scheme))
    return 8 * made.nbytes / (1024 * 4096)


def into(text: str, table: str) -> str:
    """A document with the table between its marks; ValueError when it has none."""
    for mark in (BEGIN, END):
        if mark not in text:
            raise ValueError(f"the document has no {mark}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
