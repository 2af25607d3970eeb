"""Fitting the model of time of gemm_ws: times that the model itself made give back its costs."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.linear.frag16_sm90 import gemm_ws
from gristmill.kernels.linear.frag16_sm90.instances import formats
from lab import gemm_ws_costs as program

FORM = formats()["int4_g128"]
TRUE = gemm_ws.Costs(0.5, 0.5, 3.0, 2.0, 0.5, 3.0, 0.3, 5.0, 0.2)
KEY = (128, 2, 1, 1)


FITTED = ((256, 4096, 4096), (512, 6144, 4096), (128, 28672, 4096), (1024, 5120, 2048))


def times(
    costs: dict[tuple[int, int, int, int], gemm_ws.Costs], problems: tuple[tuple[int, int, int], ...] = FITTED
) -> list[dict[str, object]]:
    """Rows of a file of times in which a configuration takes as long as these costs say."""
    op, made = default_registry().op("linear"), []
    for m, n, k in problems:
        for shape, partition in gemm_ws.candidates(FORM, m, n, k, 132):
            if shape[:4] in costs:
                config = gemm_ws.config_of(FORM, shape, partition, m, n, k) | {"format": FORM.name}
                us = gemm_ws.microseconds(FORM, shape, partition, m, n, k, 132, costs[shape[:4]])
                problem = str(op.problem(f"m={m},n={n},k={k},x=bf16,w=int4_g128"))
                kernel = "linear_w4a16_gemm_ws_sm90"
                made.append({"problem": problem, "kernel": kernel, "config": config, "us": us})
    return [
        *made,
        {"problem": made[0]["problem"], "kernel": "linear_dequant_frag16", "config": {}, "us": 1.0},
    ]


def test_a_fit_expects_what_was_measured() -> None:
    """Of problems that it has not seen, too."""
    samples = program.read(times({KEY: TRUE}))
    found = program.descend(gemm_ws.COSTS[KEY], partial(program.error, samples))
    assert program.error(samples, TRUE) < 1e-9 < 0.02 < program.error(samples, gemm_ws.COSTS[KEY])
    assert program.error(samples, found) < 0.01 and min(found) >= 0
    others = program.read(times({KEY: TRUE}, ((256, 7168, 4096), (768, 4096, 8192))))
    assert program.error(others, found) < 0.03 < program.error(others, gemm_ws.COSTS[KEY])


def test_a_choice_costs_what_the_chosen_one_takes_beyond_the_fastest() -> None:
    other = (256, 2, 1, 1)
    samples = program.read(times({KEY: TRUE, other: TRUE}))
    true = {KEY: TRUE, other: TRUE}
    assert program.chosen(samples, true) == pytest.approx(1)
    # By a model in which the one shape takes no time it is always chosen.
    wrong = true | {other: gemm_ws.Costs(*[0.0] * 9)}
    assert program.chosen(samples, wrong) > 1.05


def test_the_program_writes_both_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "times.json", tmp_path / "costs.json"
    file.write_text(json.dumps({"rows": times({KEY: TRUE})}))
    monkeypatch.setattr(sys, "argv", ["gemm_ws_costs", "--out", str(out), str(file)])
    assert program.main() == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["shape"] == list(KEY) and row["error_after"] < row["error_before"]
    assert "(128, 2, 1, 1): Costs(" in capsys.readouterr().out
