"""`lab.vllm_linear` with a planted vLLM: engines whose time per token is known."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab import vllm_linear
from lab.engine import repeat_layers

CLOCK = [0.0]
"""Seconds: only planted engines move it."""
SLEEP = {"vllm": 0.004, "gristmill": 0.001}


class PlantedLLM:
    """Half a second for the prompts, and per token of the longest request what SLEEP says."""

    missing = 0

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def generate(self, prompts: list[Any], params: list[Any], **_: Any) -> list[Any]:
        counts = [param.max_tokens - self.missing for param in params]
        CLOCK[0] += 0.5 + SLEEP[self.engine] * max(counts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in counts]


def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the engines of the program in this process, without vLLM."""
    module = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_linear, "load", lambda folder, options: PlantedLLM(options.engine))
    clock = SimpleNamespace(perf_counter=lambda: CLOCK[0], monotonic=time.monotonic)
    monkeypatch.setattr(vllm_linear, "time", clock)
    monkeypatch.setattr(vllm_linear, "layers", lambda llm, engine: [])

    def child(engine: str, folder: Path, out: Path, argv: list[str]) -> dict[str, Any]:
        assert not vllm_linear.main([*argv, "--engine", engine, "--model", str(folder), "--out", str(out)])
        row: dict[str, Any] = json.loads(out.read_text())
        return row

    monkeypatch.setattr(vllm_linear, "child", child)


LINE = "--batches 1,2 --tokens 16 --rounds 1 --requests 2 --lengths 4,8 --device cpu"


def test_engines_run_in_turns_and_ratios_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "out.json"
    assert not vllm_linear.main([*LINE.split(), "--model", str(tmp_path), "--out", str(out)])
    result = json.loads(out.read_text())
    assert [row["engine"] for row in result["rows"]] == ["vllm", "gristmill", "gristmill", "vllm"]
    ratios = result["ratios"]["gristmill"]
    assert ratios["decode at batch 1"] == pytest.approx(4) == ratios["decode at batch 2"]
    assert 1 < ratios["throughput"] < 1.1  # prompts count
    assert all(row["decode_ms"]["2"] == pytest.approx([SLEEP[row["engine"]] * 1e3]) for row in result["rows"])


def test_tokens_that_are_missing_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    monkeypatch.setattr(PlantedLLM, "missing", 1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RuntimeError, match="expected .* tokens of output, got"):
        vllm_linear.main([*LINE.split(), "--model", str(tmp_path), "--out", str(tmp_path / "out.json")])


def test_an_engine_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_linear.main(["--model", ".", "--engines", "vllm,other", "--out", str(tmp_path / "o")])
    assert "no engine other; known: vllm, gristmill" in capsys.readouterr().err


def test_layers_alike_are_one_row() -> None:
    rows = [
        {"name": "0.qkv", "taken": True},
        {"name": "0.out", "taken": False},
        {"name": "1.qkv", "taken": True},
    ]
    assert vllm_linear.alike(rows) == [
        {"name": "0.qkv", "taken": True, "count": 2},
        {"name": "0.out", "taken": False, "count": 1},
    ]


def test_layers_are_repeated(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    kept = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    config = {"vocab_size": 7, "quantization_config": {"quant_method": "compressed-tensors", "ignore": kept}}
    (made / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    of_layers = {f"model.layers.{i}.mlp.weight": torch.full((2,), float(i)) for i in range(2)}
    save_file({**of_layers, "model.norm.weight": torch.ones(3)}, made / "model.safetensors")
    out = repeat_layers(made, 2, 5, tmp_path / "out")
    changed = json.loads((out / "config.json").read_text())
    assert sorted(changed.pop("quantization_config")["ignore"]) == [
        "lm_head",
        *(f"model.layers.{i}.mlp.gate" for i in range(5)),
    ]
    assert changed == {"num_hidden_layers": 5, "vocab_size": 7}
    tensors = load_file(out / "model.safetensors")
    assert tensors.pop("model.norm.weight").tolist() == [1.0, 1.0, 1.0]
    assert {name: int(tensor[0]) for name, tensor in tensors.items()} == {
        f"model.layers.{i}.mlp.weight": i % 2 for i in range(5)
    }
