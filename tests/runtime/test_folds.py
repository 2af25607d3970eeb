"""Scales folded into the preceding operation: with any scales, whole models still compute the same, also
according to transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
from gristmill.quant.formats import open_writer
from gristmill.quant.writing import folds as folding
from gristmill.quant.writing.methods import Awq
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.models import model_table
from gristmill.tools import folds as rules
from gristmill.tools.calibration import LayerStream, make_method
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle, test_architectures, test_models
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

IDS = [(7 * i * i + 3) % 160 for i in range(40)]
SMALL: dict[str, dict[str, Any]] = {
    "llama, biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "llama, a k and v for each q": {"num_key_value_heads": 4},
    "deepseek": {},
    "deepseek, no query latents": {"q_lora_rank": None},
}


def build(name: str, folder: Path) -> Any:
    """Returns a random float32 model of transformers, saved in `folder`."""
    if name in test_models.MODELS:
        return test_models.build(name, folder)
    import transformers

    family, base = (
        ("Llama", test_architectures.LLAMA)
        if name.startswith("llama")
        else ("DeepseekV3", test_architectures.DEEPSEEK)
    )
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**base, **SMALL[name]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.normal_(
                0, 1.5 / parameter.shape[-1] ** 0.5
            )
    model.save_pretrained(folder)
    return model


def folded(source: Path, out: Path, spoil: Callable[[folding.Fold], folding.Fold] = lambda fold: fold) -> int:
    """Writes the model with random scales between 1/8 and 8 folded in. Returns the number of folds."""
    config, checkpoint = load_config(source), SafetensorsCheckpoint(source)
    tensors = {name: checkpoint.read(name).clone() for name in checkpoint}
    generator, count = torch.Generator().manual_seed(3), 0
    for index in range(config.num_layers):
        weights = tuple(w for w in model_table(config).weights if w.target.startswith(f"layers.{index}."))
        for fold in rules.folds(config, index, weights):
            columns = tensors[f"{fold.modules[0]}.weight"].shape[1]
            channels = columns if fold.columns is None else int(fold.columns.max()) + 1
            folding.apply(spoil(fold), (torch.rand(channels, generator=generator) * 6 - 3).exp2(), tensors)
            count += 1
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    return count


@pytest.mark.parametrize("name", [*SMALL, "qwen2", "qwen3", "qwen3-moe", "mixtral"])
def test_a_folded_model_says_what_it_said(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(name, tmp_path / "plain")
    layers = load_config(tmp_path / "plain").num_layers
    assert folded(tmp_path / "plain", tmp_path / "out") >= 4 * layers
    expected = oracle.logits(model, IDS)
    scale = float(expected.abs().max())
    # the folded directory as transformers reads it, and as gristmill reads it
    assert float((oracle.logits(oracle.load(tmp_path / "out"), IDS) - expected).abs().max()) < 2e-4 * scale
    assert float((window_logits(make(tmp_path / "out").engine, IDS) - expected).abs().max()) < 2e-4 * scale


@pytest.mark.parametrize("omitted", ["kept", "rows", "columns"])
def test_a_rule_that_forgets_something_is_seen(
    omitted: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    """Planted faults: the router is not scaled, values are divided in the wrong rows, heads share the wrong
    channels."""
    name = {"kept": "mixtral", "rows": "deepseek", "columns": "qwen3"}[omitted]
    model = build(name, tmp_path / "plain")

    def spoil(fold: folding.Fold) -> folding.Fold:
        if omitted == "kept" or getattr(fold, omitted) is None:
            return replace(fold, kept=()) if omitted == "kept" else fold
        return replace(fold, **{omitted: getattr(fold, omitted).roll(1)})

    folded(tmp_path / "plain", tmp_path / "out", spoil)
    expected = oracle.logits(model, IDS)
    assert float((window_logits(make(tmp_path / "out").engine, IDS) - expected).abs().max()) > 1e-2 * float(
        expected.abs().max()
    )


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
def test_bf16_norms_hold_the_scales_exactly(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    folded(MODELS / name, tmp_path / "out")
    after, before = SafetensorsCheckpoint(tmp_path / "out"), SafetensorsCheckpoint(MODELS / name)
    norms = [n for n in before if "norm" in n and ".layers." in n and ".layers.4." not in n]
    assert all(after.spec(n)[0] == torch.bfloat16 for n in norms)
    assert any(not torch.equal(after.read(n), before.read(n)) for n in norms)
    expected = oracle.window_logits(name, 0)[:64]
    actual = window_logits(make(tmp_path / "out").engine, oracle.window(0)[:64])
    assert float((actual - expected).abs().max()) < 2e-4 * float(expected.abs().max())


def test_awq_rounds_the_scaled_weights(policy: Policy) -> None:
    """Outputs of q and k, on their own inputs, lose less than with round to nearest; those of v at most 1.2
    times as much."""
    method = Awq(stream := LayerStream(MODELS / LLAMA, oracle.eval_tokens(), 128, 4, policy=policy))
    source = SafetensorsCheckpoint(MODELS / LLAMA)
    tensors = {name: source.read(name) for name in source if ".layers.0." in name}
    target = open_writer("gristmill", "int4_g128")
    outcome = method.round(0, stream.weights_of(0), tensors, target)
    moments = stream.moments(0, tensors)
    norm = "model.layers.0.input_layernorm.weight"
    spread = tensors[norm].float() / outcome.changed[norm].float()
    for part in "qkv":
        module = f"model.layers.0.self_attn.{part}_proj"
        weight, h = tensors[f"{module}.weight"].float(), moments.sums[module]
        rows = torch.ones(len(weight), 1)
        if part == "v":  # the rows of v are divided by the factors of the columns of o
            exact, scaled = weight, outcome.weights[module].dequantize() / spread
            rows = ((scaled * exact).sum(1) / (exact * exact).sum(1))[:, None]
        errors = [
            ((e @ h) * e).sum()
            for e in (
                outcome.weights[module].dequantize() / spread / rows - weight,
                target.quantize(weight).dequantize() - weight,
            )
        ]
        assert float(errors[0]) < (0.9 if part != "v" else 1.2) * float(errors[1])


def test_gpt_oss_is_refused_by_name(tmp_path: Path, policy: Policy) -> None:
    test_models.build("gpt-oss", tmp_path)
    config = load_config(tmp_path)
    weights = tuple(w for w in model_table(config).weights if w.target.startswith("layers.0."))
    with pytest.raises(UsageError, match=r"GptOssForCausalLM has its experts in one tensor: no rule .*AWQ"):
        rules.folds(config, 0, weights)
    with pytest.raises(UsageError, match="GptOssForCausalLM has its experts in one tensor"):
        make_method("awq", tmp_path, [1] * 128, window=64, windows=2, policy=policy)


@pytest.mark.parametrize("part", ["qkv", "gate_up"])
def test_parts_that_the_checkpoint_has_fused_are_refused(part: str) -> None:
    """Rows of v, and of up, are found by tensor name: in a fused tensor, other rows would be divided."""
    config = load_config(MODELS / LLAMA)
    weights = tuple(w for w in model_table(config).weights if w.target.startswith("layers.0."))
    assert len(rules.folds(config, 0, weights)) == 4
    fused = tuple(
        replace(w, sources=(f"model.layers.0.{part}_proj",), rows=(sum(w.rows),))
        if w.target.endswith(part)
        else w
        for w in weights
    )
    with pytest.raises(UsageError, match=f"stores {part} in 1 tensors, not in .: no rule says where to fold"):
        rules.folds(config, 0, fused)
