"""kernelbench decode on a CPU: a tiny model in the same engine, loader and decode steps as on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill.bench import decode
from gristmill.bench.cli import cli
from gristmill.bench.shapes import ShapeError, load_config
from gristmill.kernel_registry.policy import Policy
from gristmill.tools.random_model import RandomCheckpoint

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_rows_and_result_file(tiny: str, tmp_path: Path, policy_file: Any) -> None:
    policy_file()
    out = tmp_path / "decode.json"
    result = CliRunner().invoke(
        cli,
        [
            "decode",
            "--model",
            tiny,
            "--quant",
            "int4_g128,bf16",
            "--batch",
            "1,3",
            "--context",
            "20",
            "--steps",
            "5",
            "--target",
            "cpu",
            "--out",
            str(out),
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert [(row["quant"], row["batch"]) for row in rows] == [
        ("int4_g128", 1),
        ("int4_g128", 3),
        ("bf16", 1),
        ("bf16", 3),
    ]
    # qkv has 512 rows, out 256, gate and up 1024, down 256 of 512: bits per weight, and one bf16 scale per
    # group of 128
    weights = 2 * (256 * (512 + 256 + 1024) + 256 * 512)
    assert (
        rows[0]["linear_bytes"] == weights // 2 + weights // 128 * 2
        and rows[2]["linear_bytes"] == 2 * weights
    )
    assert all(row["head_bytes"] == 300 * 256 * 2 for row in rows)
    assert all(
        row["linear_ms"] > 0 and row["device_ms"] > 0 and row["floor_ms"] > row["linear_floor_ms"] > 0
        for row in rows
    )
    (graph,) = [g for g in rows[1]["graphs"] if g["seqs"]]
    assert (graph["seqs"], graph["captured"]) == (4, True) and graph["steps"] >= 9
    stored = json.loads(out.read_text())
    assert [len(row["step_samples_ms"]) for row in stored["rows"]] == [5] * 4 and stored["environment"][
        "target"
    ].startswith("cpu")


def test_every_step_is_a_decode_step(monkeypatch: pytest.MonkeyPatch, policy_file: Any) -> None:
    """Planted fault: if the measured steps were not decode steps, no graph would count them."""
    (row,) = decode.measure_decode(
        decode.model_config(TINY), "bf16", (2,), 20, 5, "cpu", Policy.load(policy_file())
    )
    counted = sum(g["steps"] for g in row["graphs"] if g["seqs"])
    assert counted >= 5 + decode.WARM_STEPS
    monkeypatch.setattr("gristmill.runtime.decode_graphs.DecodeGraphs.why_not", lambda *_: "planted")
    with pytest.raises(ValueError, match="no decode step ran as a graph"):
        list(decode.measure_decode(decode.model_config(TINY), "bf16", (2,), 20, 5, "cpu"))


def test_random_weights_are_those_of_the_table() -> None:
    import torch

    from gristmill.runtime.models import model_table

    config = decode.model_config(TINY)
    first, same_seed, other = (
        RandomCheckpoint(model_table(config), torch.float32, torch.device("cpu"), seed) for seed in (1, 1, 2)
    )
    name = "model.layers.1.mlp.down_proj.weight"
    assert first.spec(name) == (torch.float32, (256, 512)) and name in first and "model.nothing" not in first
    assert torch.equal(first.read(name), same_seed.read(name)) and not torch.equal(
        first.read(name), other.read(name)
    )
    assert not torch.equal(first.read(name), first.read("model.layers.0.mlp.down_proj.weight"))
    assert 0.9 < float(first.read(name).std()) * 512**0.5 < 1.1


def test_mistakes(tiny: str) -> None:
    with pytest.raises(ShapeError, match="decoding is measured for"):
        decode.model_config(load_config("gpt-oss-20b"))
    for arguments, message in (
        (["--batch", "0"], "--batch takes"),
        (["--context", "9000"], "positions"),
        (["--target", "h100"], "not a device"),
        (["--trace"], "--trace takes the kernels of a GPU"),
    ):
        result = CliRunner().invoke(cli, ["decode", "--model", tiny, "--target", "cpu", *arguments])
        assert result.exit_code != 0 and message in result.output
