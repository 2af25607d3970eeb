"""Directories that `gristmill quantize --format` writes give the same logits in gristmill and in
transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import awq
from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
from gristmill.quant.formats import open_format
from gristmill.quant.writing.checkpoint import write_quantized
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.models import model_table
from gristmill.tools.calibration import make_method
from gristmill.tools.cli import cli
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle, test_models
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries two exponents of AWQ instead of twenty: which are chosen does not matter to what is written."""
    monkeypatch.setattr(awq, "ALPHAS", awq.ALPHAS[::10])


def write(
    name: str, out: Path, form: str, scheme: str, method: str = "rtn", policy: Policy | None = None
) -> Path:
    tokens = None if method == "rtn" else oracle.eval_tokens()[200_000:]
    chosen = make_method(method, MODELS / name, tokens, window=256, windows=2, policy=policy)
    table = model_table(load_config(MODELS / name))
    write_quantized(MODELS / name, out, table, QuantScheme.parse(scheme), form=form, method=chosen)
    return out


@pytest.mark.parametrize(
    ("name", "form", "scheme"),
    [
        (LLAMA, "compressed-tensors", "int4_g128_zp"),
        (LLAMA, "gptq", "int3_g64"),
        (LLAMA, "modelopt", "nvfp4"),
        (LLAMA, "fp8", "fp8_block"),
        (DEEPSEEK, "compressed-tensors", "mxfp4"),
        (DEEPSEEK, "modelopt", "mxfp8"),
        (DEEPSEEK, "fp8", "fp8_block"),
    ],
)
def test_logits_are_those_of_quantizing_at_load(
    name: str, form: str, scheme: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    ids = oracle.window(0)[:33]
    stored = make(write(name, tmp_path / "out", form, scheme))
    rounded = make(name, quant=scheme)
    actual, expected = window_logits(stored.engine, ids), window_logits(rounded.engine, ids)
    # GPTQ's scales are float16 with the same values, in the same kernel
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def by_transformers(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


OFTEN = ("int4_g128", "fp8_block", "nvfp4")
SELDOM = ("int3_g64_zp", "int8_ch", "fp8", "fp8_ch", "mxfp4", "mxfp8")


METHODS = ("rtn", "gptq", "awq")


@pytest.mark.parametrize(
    ("name", "scheme", "method"),
    [
        pytest.param(
            LLAMA,
            s,
            m,
            marks=[] if (s in OFTEN and m == "rtn") or (s, m) == ("int4_g128", "awq") else pytest.mark.slow,
        )
        for s in (*OFTEN, *SELDOM)
        for m in METHODS
    ]
    + [
        pytest.param(DEEPSEEK, s, "rtn", marks=[] if s == "int4_g128" else pytest.mark.slow)
        for s in ("int4_g128", "int8_ch", "fp8_ch", "mxfp4")
    ],
)
def test_transformers_with_compressed_tensors(
    name: str, scheme: str, method: str, make: Callable[..., LLM], policy: Policy, tmp_path: Path
) -> None:
    """Also experts where transformers reads their scales separately, which it does not do for fp8_block,
    nvfp4 and mxfp8 (5.17)."""
    pytest.importorskip("compressed_tensors")
    out = write(name, tmp_path / "out", "compressed-tensors", scheme, method, policy)
    ids = oracle.window(1)[:33]
    model = by_transformers(out)
    model.hf_quantizer.compressor.decompress_model(model)
    actual, expected = window_logits(make(out).engine, ids), oracle.logits(torch.nn.Module.float(model), ids)
    error = float((actual - expected).abs().max() / expected.abs().max())
    # the package dequantizes NVFP4 in bfloat16: its weights, unlike ours, are rounded to 8 bits
    assert error < (2e-2 if scheme == "nvfp4" else 2e-3), error


@pytest.mark.parametrize("method", METHODS)
def test_transformers_with_fine_grained_fp8(
    method: str, make: Callable[..., LLM], policy: Policy, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    from transformers import FineGrainedFP8Config

    out = write(LLAMA, tmp_path / "out", "fp8", "fp8_block", method, policy)
    ids = oracle.window(1)[:33]
    expected = oracle.logits(
        by_transformers(out, quantization_config=FineGrainedFP8Config(dequantize=True)), ids
    )
    actual = window_logits(make(out).engine, ids)
    assert float((actual - expected).abs().max() / expected.abs().max()) < 2e-3


def by_hand(folder: Path) -> Any:
    """Returns transformers' float model with the values of a directory: dequantized weights, all else as
    stored."""
    config, checkpoint = load_config(folder), SafetensorsCheckpoint(folder)
    assert config.quantization is not None
    form = open_format(config.quantization)
    model = oracle.load(MODELS / folder.name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                name in checkpoint
                and checkpoint.spec(name)[0].is_floating_point
                and checkpoint.spec(name)[0].itemsize > 1
            ):
                parameter.copy_(checkpoint.read(name))
            elif parameter.dim() == 2:
                read_back = form.read(checkpoint, name.removesuffix(".weight"), tuple(parameter.shape))
                assert read_back is not None, name
                parameter.copy_(read_back.weight.dequantize())
            else:  # experts of a layer in one tensor: gate and up together
                for expert, matrix in enumerate(parameter):
                    base = f"{name.rpartition('.')[0]}.{expert}"
                    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
                    rows = matrix.shape[0] // len(parts)
                    read = [
                        form.read(checkpoint, f"{base}.{part}", (rows, matrix.shape[1])) for part in parts
                    ]
                    matrix.copy_(
                        torch.cat(
                            [read_back.weight.dequantize() for read_back in read if read_back is not None]
                        )
                    )
    return model


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("gristmill", "int4_g64_zp"),
        ("gptq", "int4_g128"),
        ("modelopt", "nvfp4"),
        ("compressed-tensors", "mxfp4"),
    ],
)
@pytest.mark.parametrize(
    "method",
    [pytest.param("rtn", marks=pytest.mark.slow), pytest.param("gptq", marks=pytest.mark.slow), "awq"],
)
@pytest.mark.parametrize("name", [LLAMA, pytest.param(DEEPSEEK, marks=pytest.mark.slow)])
def test_logits_are_transformers_with_the_same_values(
    name: str, form: str, scheme: str, method: str, make: Callable[..., LLM], policy: Policy, tmp_path: Path
) -> None:
    """Formats that transformers does not read: GPTQ without the gptqmodel package, ModelOpt's, our own; also
    with experts."""
    out = write(name, tmp_path / name, form, scheme, method, policy)
    ids = oracle.window(1)[:33]
    expected, plain = oracle.logits(by_hand(out), ids), oracle.logits(oracle.oracle(name), ids)
    scale = float(expected.abs().max())
    assert (
        float((window_logits(make(out).engine, ids) - expected).abs().max())
        < 2e-3 * scale
        < float((plain - expected).abs().max())
    )


def test_gpt_oss_by_transformers(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Experts in MXFP4 as OpenAI stores them, all else unchanged: transformers loads the directory and gives
    the same logits."""
    pytest.importorskip("accelerate")
    test_models.build("gpt-oss", tmp_path / "plain")
    out = tmp_path / "out"
    arguments = [
        "--model",
        str(tmp_path / "plain"),
        "--quant",
        "mxfp4",
        "--format",
        "mxfp4",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(cli, ["quantize", *arguments])
    assert result.exit_code == 0, result.output
    plain, written = SafetensorsCheckpoint(tmp_path / "plain"), SafetensorsCheckpoint(out)
    same = [name for name in plain if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert all(torch.equal(plain.read(name), written.read(name)) for name in same)
    assert set(written) - set(same) == {
        f"{n}{suffix}" for n in set(plain) - set(same) for suffix in ("_blocks", "_scales")
    }
    ids, stored = test_models.IDS, make(out)
    expected, before = (
        oracle.logits(by_transformers(out).float(), ids),
        window_logits(make(tmp_path / "plain").engine, ids),
    )
    actual = window_logits(stored.engine, ids)
    scale = float(expected.abs().max())
    assert float((actual - expected).abs().max()) < 2e-3 * scale < float((before - expected).abs().max())
    rounded = window_logits(make(tmp_path / "plain", quant="mxfp4").engine, ids)
    assert float((actual - rounded).abs().max()) > 1e-5  # when quantizing at load, attention is rounded too


def test_the_command(tmp_path: Path, make: Callable[..., LLM]) -> None:
    out = tmp_path / "out"
    arguments = [
        "--model",
        str(MODELS / LLAMA),
        "--quant",
        "int4_g64",
        "--format",
        "gptq",
        "--out",
        str(out),
        "--json",
    ]
    result = CliRunner().invoke(cli, ["quantize", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["format"], report["scheme"]) == ("gptq", "int4_g64")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (
        config["quant_method"] == "gptq"
        and config["checkpoint_format"] == "gptq_v2"
        and config["group_size"] == 64
    )
    assert make(out).generate(["The"])[0].token_ids


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gptq checkpoints do not hold nvfp4"):
        write(LLAMA, tmp_path / "out", "gptq", "nvfp4")
    with pytest.raises(UsageError, match="no format 'exl2' to write"):
        write(LLAMA, tmp_path / "out", "exl2", "nvfp4")
    with pytest.raises(
        UsageError, match="mxfp4 checkpoints hold experts in one tensor, as gpt-oss has them, and .* has none"
    ):
        write(LLAMA, tmp_path / "out", "mxfp4", "mxfp4")
    test_models.build("gpt-oss", tmp_path / "plain")
    with pytest.raises(
        UsageError,
        match="has its experts in one tensor, which modelopt does not hold: write mxfp4 in the format mxfp4",
    ):
        write(str(tmp_path / "plain"), tmp_path / "out", "modelopt", "mxfp4")
    with pytest.raises(
        UsageError, match="GptOssForCausalLM has its experts in one tensor, which is not calibrated"
    ):
        make_method("gptq", tmp_path / "plain", [1] * 64, window=32, windows=2)
    assert not (tmp_path / "out").exists()
