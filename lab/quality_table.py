"""The quality table of a result file of `lab.quality`, as Markdown, and its place in a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.kernel_registry.scheme import QuantScheme

MARK = "quality-table"
NAMES = {"rtn": "nearest", "gptq": "GPTQ", "awq": "AWQ"}


def render(data: Mapping[str, Any]) -> str:
    """Perplexities, one line per scheme, one column per model and method; "-" for missing rows.

    Below it, per model, the loss of int4_g128 by method (over the model as stored, in nats), also relative to round to nearest; then
    the table of quantized KV caches, if there are rows of them.
    """
    rows = {(row["model"], row["scheme"], row["method"]): row for row in data["rows"] if "kv" not in row}
    models = list(dict.fromkeys(model for model, scheme, _ in rows if scheme == "float"))
    head = [
        "format",
        "bits per weight",
        *(f"{model}: {name}" if name == "nearest" else name for model in models for name in NAMES.values()),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for scheme in dict.fromkeys(scheme for _, scheme, _ in rows):
        cells = [_cell(rows.get((model, scheme, method))) for model in models for method in NAMES]
        name, width = ("as stored", "16") if scheme == "float" else (f"`{scheme}`", f"{bits(scheme):.3g}")
        if scheme == "float":
            cells = ["" if cell == "-" else cell for cell in cells]
        lines.append(f"| {name} | {width} | " + " | ".join(cells) + " |")
    sentences = [_sentence(model, rows) for model in models]
    return "\n".join([*lines, "", *sentences, *_caches(data, models)])


def _caches(data: Mapping[str, Any], models: list[str]) -> list[str]:
    """The table of quantized KV caches, one line per format; [] without rows."""
    rows = {(row["model"], row["kv"]): row for row in data["rows"] if "kv" in row}
    plain = {row["model"]: row for row in data["rows"] if row["scheme"] == "float" and "kv" not in row}
    if not rows:
        return []
    lines = [
        f"| KV cache | bits per element | {' | '.join(models)} | nats per token lost |",
        "|---|---:|" + "---:|" * (len(models) + 1),
        f"| as activations | 32 | {' | '.join(_cell(plain.get(model)) for model in models)} | |",
    ]
    for kv in dict.fromkeys(kv for _, kv in rows):
        perplexities = {model: rows[model, kv] for model in models if (model, kv) in rows}
        lost = ", ".join(f"{row['loss'] - plain[model]['loss']:+.4f}" for model, row in perplexities.items())
        width = next(iter(perplexities.values()))["kv_bits"]
        cells = " | ".join(_cell(perplexities.get(model)) for model in models)
        lines.append(f"| `{kv}` | {width:.3g} | {cells} | {lost} |")
    return ["", *lines]


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
    """Bits per weight including scales, for a large matrix."""
    import torch

    from gristmill.quant import quantize

    return 8 * quantize(torch.ones(1024, 4096), QuantScheme.parse(scheme)).nbytes / (1024 * 4096)


def into(text: str, table: str, mark: str = MARK) -> str:
    """The document with the table between its marks, comments of that name; ValueError if it has none."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    for comment in (begin, end):
        if comment not in text:
            raise ValueError(f"the document has no {comment}")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
