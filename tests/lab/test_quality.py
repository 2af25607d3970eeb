"""The quality sweep: a row equals the output of its command, an interrupted sweep resumes, and the table
states the rows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill.quant import awq
from gristmill.tools.cli import cli
from lab import quality
from lab.quality import FLOAT, SCHEMES, Case, Settings, cases, command, key_of, kv_cases, measure, run
from lab.quality_table import into, render

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
LLAMA = str(MODELS / "docs-llama")
QUICK = Settings(
    str(MODELS / "eval_tokens.u16"), window=64, windows=2, calibration_window=64, calibration_windows=2
)


@pytest.mark.filterwarnings("ignore:.*no scales of the KV cache")
@pytest.mark.parametrize(
    "row_of", [(FLOAT, "rtn"), ("nvfp4", "rtn"), ("int4_g128_zp", "awq"), (FLOAT, "rtn", "fp8")], ids=" ".join
)
def test_a_row_is_what_its_command_prints(
    row_of: tuple[str, ...], tmp_path: Path, policy_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_file()
    monkeypatch.setattr(awq, "ALPHAS", awq.ALPHAS[::8])  # of the search, which row and command make alike
    case = Case(LLAMA, *row_of)
    row = measure(case, QUICK)
    assert row["command"] == command(case, QUICK) and row["tokens"] == 126 and key_of(row) == case.key
    for part in row["command"].replace(" OUT", f" {tmp_path}/out").split(" && "):
        result = CliRunner().invoke(cli, [*shlex.split(part)[1:], "--json"])
        assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["loss"] == pytest.approx(row["loss"], abs=1e-6)


def test_a_sweep_goes_on_where_it_ended(
    tmp_path: Path, policy_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_file()
    monkeypatch.setattr(
        quality,
        "sweep",
        lambda todo, *_: (
            {"model": Path(m).name, "scheme": s, "method": h, "loss": 1.0, "seconds": 0}
            for m, s, h, _ in todo[:2]
        ),
    )
    out, arguments = (
        tmp_path / "q.json",
        ([LLAMA], ["nvfp4"], ["rtn", "gptq", "awq"], QUICK, tmp_path / "q.json", 1, 9.0),
    )
    assert run(*arguments) == 2
    assert run(*arguments) == 0
    data = json.loads(out.read_text())
    assert [(r["scheme"], r["method"], r["run"]) for r in data["rows"]] == [
        (FLOAT, "rtn", 0),
        ("nvfp4", "rtn", 0),
        ("nvfp4", "gptq", 1),
        ("nvfp4", "awq", 1),
    ]
    assert data["runs"][0]["gristmill"] and data["settings"]["windows"] == 2
    with pytest.raises(SystemExit, match="holds rows of other settings"):
        run([LLAMA], ["nvfp4"], ["rtn"], Settings(QUICK.tokens, windows=3), out, 1, 9.0)


def test_no_row_is_begun_after_the_time() -> None:
    assert list(quality.sweep([Case(LLAMA, FLOAT, "rtn")], QUICK, 1, -1.0)) == []


def data(**losses: float) -> dict[str, Any]:
    rows = [{"model": "m", "scheme": FLOAT, "method": "rtn", "loss": 2.0, "perplexity": 7.389}]
    rows += [
        {"model": "m", "scheme": "int4_g128", "method": h, "loss": v, "perplexity": 5 + v}
        for h, v in losses.items()
    ]
    return {"rows": rows}


def test_the_table_says_what_the_rows_say() -> None:
    assert render(data(rtn=2.25, awq=2.125)).splitlines() == [
        "| format | bits per weight | m: nearest | GPTQ | AWQ |",
        "|---|---:|---:|---:|---:|",
        "| as stored | 16 | 7.389 |  |  |",
        "| `int4_g128` | 4.12 | 7.250 | - | 7.125 |",
        "",
        "m in `int4_g128`, nats per token over the model as stored: nearest +0.2500, AWQ +0.1250 (50%).",
    ]
    two = data(rtn=2.5, gptq=2.1)
    two["rows"] += [{**row, "model": "n", "perplexity": 1.0} for row in data(rtn=2.5)["rows"]]
    lines = render(two).splitlines()
    assert (
        lines[3] == "| `int4_g128` | 4.12 | 7.500 | 7.100 | - | 1.000 | - | - |"
        and "GPTQ +0.1000 (20%)." in lines[5]
    )
    cached = data(rtn=2.5)
    cached["rows"] += [{**cached["rows"][0], "kv": "fp8", "kv_bits": 8.0, "loss": 2.01, "perplexity": 7.5}]
    assert render(cached).splitlines()[-4:] == [
        "| KV cache | bits per element | m | nats per token lost |",
        "|---|---:|---:|---:|",
        "| as activations | 32 | 7.389 | |",
        "| `fp8` | 8 | 7.500 | +0.0100 |",
    ]
    document = "a\n<!-- quality-table -->\nold\n<!-- /quality-table -->\nb\n"
    assert into(document, "new") == document.replace("old", "new")
    with pytest.raises(ValueError, match="no <!-- other -->"):
        into(document, "new", "other")
    with pytest.raises(ValueError, match="no <!-- quality-table -->"):
        into("a", "new")


def test_every_scheme_and_method_is_a_row() -> None:
    all_cases = cases(["a", "b"], SCHEMES, quality.METHODS)
    assert len(all_cases) == len({*all_cases}) == 2 + 2 * 3 * len(SCHEMES) and len(SCHEMES) >= 16
    line = command(Case("m dir", "mxfp4", "gptq"), QUICK)
    assert (
        "--model 'm dir' --quant mxfp4 --out OUT --method gptq --calibration" in line
        and " && gristmill eval --model OUT" in line
    )


def test_models_with_a_latent_cache_have_no_rows_of_quantized_ones() -> None:
    all_cases = kv_cases([LLAMA, str(MODELS / "docs-deepseek")], quality.KV_DTYPES)
    assert [case.kv for case in all_cases] == [*quality.KV_DTYPES] and {case.model for case in all_cases} == {
        LLAMA
    }
    assert command(all_cases[1], QUICK).endswith("--device cpu --kv-dtype fp8_token_head")
