"""The loss of quantization: the result file supports the claims about the methods."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from lab.quality import AUTO, KV_DTYPES, Case, Settings, command, key_of

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "bench" / "results" / "quality.json"
DATA = json.loads(FILE.read_text(encoding="utf-8"))
ROWS: dict[tuple[str, str, str], dict[str, Any]] = {
    (r["model"], r["scheme"], r["method"]): r for r in DATA["rows"] if "kv" not in r
}
CACHES: dict[tuple[str, str], dict[str, Any]] = {(r["model"], r["kv"]): r for r in DATA["rows"] if "kv" in r}
MODELS = ("docs-llama", "docs-deepseek")


def worse(row: dict[str, Any], than: dict[str, Any]) -> bool:
    """Whether `row` loses significantly more than `than`: by twice the standard error of the windows'
    differences."""
    difference = row["loss"] - than["loss"]
    if "window_losses" not in row or "window_losses" not in than:
        return difference > 0
    each = [a - b for a, b in zip(row["window_losses"], than["window_losses"], strict=True)]
    return difference > 2 * statistics.stdev(each) / len(each) ** 0.5


def test_rows_are_whole_and_repeatable() -> None:
    assert len(ROWS) + len(CACHES) == len(DATA["rows"])
    assert (DATA["settings"]["window"], DATA["settings"]["windows"]) == (1024, 96)
    for model, scheme, method, kv in map(key_of, DATA["rows"]):
        row = ROWS[model, scheme, method] if kv == AUTO else CACHES[model, kv]
        assert row["tokens"] == 96 * 1023
        device = "cuda" if "--device cuda" in row["command"] else "cpu"
        settings = Settings(**DATA["settings"], device=device)
        assert row["command"] == command(Case(f"examples/models/{model}", scheme, method, kv), settings)
        assert DATA["runs"][row["run"]]["device"] is not None
    for model in MODELS:
        assert (model, "float", "rtn") in ROWS
        schemes = {scheme for _, scheme, _ in ROWS} - {"float"}
        assert len(schemes) == 16 and all(
            (model, s, m) in ROWS for s in schemes for m in ("rtn", "gptq", "awq")
        )


def test_quantized_caches_lose_little() -> None:
    """The loss is between 0 and 0.01 nats per token. A model with a latent cache has none of these rows."""
    assert {*CACHES} == {("docs-llama", kv) for kv in KV_DTYPES}
    for (model, _), row in CACHES.items():
        assert 0 < row["loss"] - ROWS[model, "float", "rtn"]["loss"] < 0.01
    assert (
        CACHES["docs-llama", "fp8"]["kv_bits"] == 8
        and CACHES["docs-llama", "fp8_token_head"]["kv_bits"] == 8.5
    )


def test_gptq_loses_less() -> None:
    """GPTQ loses at most 60 % of what round to nearest loses with int4_g128 on docs-llama, and never more
    than it."""
    plain, rtn, gptq = (
        ROWS["docs-llama", s, m]["loss"]
        for s, m in (("float", "rtn"), ("int4_g128", "rtn"), ("int4_g128", "gptq"))
    )
    assert rtn - plain > 0.1 and gptq - plain <= 0.6 * (rtn - plain)
    for (model, scheme, method), row in ROWS.items():
        if method == "gptq":
            assert not worse(row, ROWS[model, scheme, "rtn"]), (model, scheme, method)


def test_a_worse_row_is_seen() -> None:
    """Planted fault: a loss slightly higher in every window is worse; one that is higher in some and lower in
    others is chance."""
    row = {"loss": 2.0, "window_losses": [2.0, 2.1, 1.9]}
    assert worse({"loss": 2.001, "window_losses": [2.001, 2.101, 1.901]}, row)
    assert not worse({"loss": 2.001, "window_losses": [2.1, 2.0, 1.903]}, row)
    assert worse({"loss": 2.001}, row) and not worse({"loss": 1.9}, row)
