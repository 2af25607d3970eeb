"""Expert layers of vLLM's own models, filled by its loader. No step of the models runs, so this needs none of vLLM's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader import get_model

from gristmill.integrations.vllm import explain, register
from gristmill.integrations.vllm.experts import GristmillExpertsMethod, stored_names
from gristmill.integrations.vllm.report import REPORT
from gristmill.quant import quantize
from tests.integrations.vllm.test_quantization import qwen, shut_down, written  # noqa: F401  # a fixture


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[str]:
    """Where this process, the only rank, meets the others."""
    shut_down()
    yield f"file://{tmp_path}/rendezvous"
    cleanup_dist_env_and_memory()


@pytest.fixture
def load(alone: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.nn.Module]:
    """vLLM's own model of a folder, with options for gristmill."""
    register()
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's worker for CPUs does
    REPORT.layers.clear()
    models: list[Any] = []

    def get(folder: Path, **options: str) -> torch.nn.Module:
        config = EngineArgs(
            str(folder),
            dtype="float32",
            quantization="gristmill",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=1024,
            additional_config={"gristmill": options},
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not models:
                init_distributed_environment(1, 0, alone, 0, backend="gloo")
                initialize_model_parallel(1, 1)
            models.append(get_model(vllm_config=config))
        models[-1].vllm_config = config
        return models[-1]

    return get


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", None])
def test_experts_are_loaded(
    form: str | None,
    qwen: Path,  # noqa: F811
    tmp_path: Path,
    environment: dict[str, str],
    load: Callable[..., torch.nn.Module],
) -> None:
    """Of a quantized checkpoint, and quantized at load: the products of what is stored."""
    folder = qwen if form is None else written(qwen, tmp_path / "quantized", "int4_g128", form)
    model = load(folder, take="all", **({} if form else {"quant": "int4_g128"}))
    assert [(row["taken"], row["scheme"], row["measured"]) for row in expert_rows()] == [
        (True, "int4_g128", "")
    ] * 2
    assert len(taken(model)) == 2
    check_products(taken(model), qwen)


def expert_rows() -> list[dict[str, Any]]:
    return [row for row in explain() if row["name"].endswith("experts")]


def routed(model: torch.nn.Module) -> list[Any]:
    """vLLM's layers of routed experts."""
    return [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]


def taken(model: torch.nn.Module) -> list[Any]:
    return [layer for layer in routed(model) if isinstance(layer.quant_method, GristmillExpertsMethod)]


def check_products(layers: Sequence[Any], checkpoint: Path) -> None:
    """The layers compute what the checkpoint in floats stores, quantized, by whichever method they have."""
    stored = load_file(checkpoint / "model.safetensors")
    x, ids = torch.randn(5, 256), torch.tensor([[0, 7], [3, 1], [3, 4], [6, 2], [5, 0]], dtype=torch.int32)
    weights = torch.rand(5, 2)
    for index, layer in enumerate(layers):
        expected = torch.zeros_like(x)
        for token, chosen in enumerate(ids.tolist()):
            for weight, expert in zip(weights[token], chosen, strict=True):
                name = f"model.layers.{index}.mlp.experts.{expert}"
                gate, up, down = (
                    quantize(stored[f"{name}.{part}_proj.weight"], "int4_g128").dequantize()
                    for part in ("gate", "up", "down")
                )
                expected[token] += weight * (down @ (silu(gate @ x[token]) * (up @ x[token])))
        torch.testing.assert_close(layer.forward_modular(x, weights, ids), expected, atol=1e-4, rtol=1e-3)


def test_what_a_checkpoint_calls_the_matrices_of_an_expert() -> None:
    """By the layer; and where vLLM's layers do not say it, by the block."""
    gates = {
        "model.layers.0.mlp.experts": ("gate_proj", "down_proj", "up_proj"),
        "model.layers.0.block_sparse_moe.experts": ("w1", "w2", "w3"),
    }
    for prefix, names in gates.items():
        assert tuple(stored_names(SimpleNamespace(), prefix).values()) == names
    fields = ("ckpt_gate_proj_name", "ckpt_down_proj_name", "ckpt_up_proj_name")
    layer = SimpleNamespace(**dict(zip(fields, ("linear", "linear_1", "linear_v"), strict=True)))
    assert stored_names(layer, "a.experts") == {"w1": "linear", "w2": "linear_1", "w3": "linear_v"}
