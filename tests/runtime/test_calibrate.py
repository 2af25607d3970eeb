"""Calibration: the moments are those of transformers' inputs, and GPTQ loses less than round to nearest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.runtime.calibrate import calibrate
from gristmill.runtime.cli import cli
from gristmill.runtime.errors import UsageError
from gristmill.runtime.evaluate import evaluate
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.loader.quantized import write_quantized
from gristmill.runtime.models import model_table
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

FAR = 200_000
"""Where calibration tokens begin: behind those that losses are measured on."""


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
def test_moments_are_those_of_transformers(name: str, policy: Policy) -> None:
    found = calibrate(MODELS / name, oracle.eval_tokens(), 64, 2, policy=policy).moments
    model, seen = oracle.oracle(name), {}

    def record(module: str) -> Callable[..., None]:
        def hook(_: object, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).double()
            seen[module] = seen.get(module, 0) + x.T @ x

        return hook

    hooks = [m.register_forward_pre_hook(record(n)) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    try:
        for index in range(2):
            oracle.logits(model, oracle.window(index, 64))
    finally:
        for hook in hooks:
            hook.remove()
    common = set(found) & set(seen)
    assert len(common) >= (42 if name == LLAMA else 20)
    for module in common:
        scale = float(seen[module].abs().max())
        assert float((found[module].double() - seen[module]).abs().max()) < 1e-3 * scale, module
    if name == DEEPSEEK:  # experts: the tokens that go to all experts together are top_k times all tokens
        layers = {n.split(".experts.")[0] for n in found if ".mlp.experts." in n}
        for layer in layers:
            parts = [m for n, m in found.items() if n.startswith(f"{layer}.experts.") and n.endswith("gate_proj")]
            total = torch.stack(parts).sum(0)
            shared = found[f"{layer}.shared_experts.gate_proj"]
            assert torch.allclose(total, 4 * shared, rtol=1e-3, atol=1e-3 * float(shared.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "int3_g64", "mxfp4", "nvfp4"])
def test_gptq_loses_less(name: str, scheme: str, make: Callable[..., LLM], policy: Policy, tmp_path: Path) -> None:
    """At most 60 % of what round to nearest loses with int4_g128 on docs-llama, and never more than it."""
    calibration = calibrate(MODELS / name, oracle.eval_tokens()[FAR:], 512, 48, policy=policy)
    table = model_table(load_config(MODELS / name))
    losses = []
    for index, rounding in enumerate((None, calibration.round)):
        out = tmp_path / str(index)
        write_quantized(MODELS / name, out, table, QuantScheme.parse(scheme), rounding=rounding)
        losses.append(evaluate(make(out).engine, oracle.eval_tokens(), 512, 16).loss)
    plain = evaluate(make(name).engine, oracle.eval_tokens(), 512, 16).loss
    rtn, gptq = (loss - plain for loss in losses)
    print(f"{name} {scheme}: round to nearest +{rtn:.4f}, gptq +{gptq:.4f}")
    assert gptq <= rtn * (0.6 if (name, scheme) == (LLAMA, "int4_g128") else 1.0)


def test_the_command_is_deterministic(tmp_path: Path, policy_file: Callable[..., Path]) -> None:
    policy_file()
    tokens = torch.tensor(oracle.eval_tokens()[FAR : FAR + 512], dtype=torch.int32).to(torch.uint16)
    (tmp_path / "ids.u16").write_bytes(tokens.view(torch.uint8).numpy().tobytes())
    for out in ("a", "b"):
        arguments = ["--model", str(MODELS / LLAMA), "--quant", "int4_g64", "--out", str(tmp_path / out), "--json"]
        arguments += ["--method", "gptq", "--calibration", str(tmp_path / "ids.u16"), "--window", "128", "--windows", "4"]
        result = CliRunner().invoke(cli, ["quantize", *arguments])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["method"] == "gptq"
    a, b = ((tmp_path / out / "model.safetensors").read_bytes() for out in "ab")
    assert a == b
    result = CliRunner().invoke(cli, ["quantize", *arguments[:6], "--method", "gptq"])
    assert result.exit_code == 2 and "go together" in result.output


def test_refusals(policy: Policy) -> None:
    with pytest.raises(UsageError, match="8 windows of 512 tokens, got 100 tokens"):
        calibrate(MODELS / LLAMA, [0] * 100, 512, 8, policy=policy)
