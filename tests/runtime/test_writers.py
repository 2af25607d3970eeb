"""Directories that `gristmill quantize --format` writes: the same logits from gristmill, and from transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.runtime.cli import cli
from gristmill.runtime.errors import UsageError
from gristmill.runtime.evaluate import window_logits
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.loader.quantized import write_quantized
from gristmill.runtime.models import model_table
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS


def write(name: str, out: Path, form: str, scheme: str) -> Path:
    write_quantized(MODELS / name, out, model_table(load_config(MODELS / name)), QuantScheme.parse(scheme), form=form)
    return out


@pytest.mark.parametrize(
    ("name", "form", "scheme"),
    [
        (LLAMA, "compressed-tensors", "int4_g128_zp"), (LLAMA, "gptq", "int3_g64"), (LLAMA, "modelopt", "nvfp4"),
        (LLAMA, "fp8", "fp8_block"), (DEEPSEEK, "compressed-tensors", "mxfp4"), (DEEPSEEK, "modelopt", "mxfp8"),
        (DEEPSEEK, "fp8", "fp8_block"),
    ],
)  # fmt: skip
def test_logits_are_those_of_quantizing_at_load(
    name: str, form: str, scheme: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    ids = oracle.window(0)[:33]
    stored = make(write(name, tmp_path / "out", form, scheme))
    rounded = make(name, quant=scheme)
    mine, theirs = window_logits(stored.engine, ids), window_logits(rounded.engine, ids)
    # GPTQ's scales are float16 of the same value: the same numbers by the same kernel
    assert float((mine - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def by_transformers(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


OFTEN = ("int4_g128", "fp8_block", "nvfp4")
SELDOM = ("int3_g64_zp", "int8_ch", "fp8", "fp8_ch", "mxfp4", "mxfp8")


@pytest.mark.parametrize("scheme", [*OFTEN, *(pytest.param(s, marks=pytest.mark.slow) for s in SELDOM)])
def test_transformers_with_compressed_tensors(scheme: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    out = write(LLAMA, tmp_path / "out", "compressed-tensors", scheme)
    ids = oracle.window(1)[:33]
    model = by_transformers(out)
    model.hf_quantizer.compressor.decompress_model(model)
    mine, theirs = window_logits(make(out).engine, ids), oracle.logits(torch.nn.Module.float(model), ids)
    error = float((mine - theirs).abs().max() / theirs.abs().max())
    # the package dequantizes NVFP4 in bfloat16: its weights, not ours, are rounded to 8 bits
    assert error < (2e-2 if scheme == "nvfp4" else 2e-3), error


def test_transformers_with_fine_grained_fp8(make: Callable[..., LLM], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import FineGrainedFP8Config

    out = write(LLAMA, tmp_path / "out", "fp8", "fp8_block")
    ids = oracle.window(1)[:33]
    theirs = oracle.logits(by_transformers(out, quantization_config=FineGrainedFP8Config(dequantize=True)), ids)
    mine = window_logits(make(out).engine, ids)
    assert float((mine - theirs).abs().max() / theirs.abs().max()) < 2e-3


def test_the_command(tmp_path: Path, make: Callable[..., LLM]) -> None:
    out = tmp_path / "out"
    arguments = ["--model", str(MODELS / LLAMA), "--quant", "int4_g64", "--format", "gptq", "--out", str(out), "--json"]
    result = CliRunner().invoke(cli, ["quantize", *arguments])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["format"], said["scheme"]) == ("gptq", "int4_g64")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq" and config["checkpoint_format"] == "gptq_v2" and config["group_size"] == 64
    assert make(out).generate(["The"])[0].token_ids


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gptq checkpoints do not hold nvfp4"):
        write(LLAMA, tmp_path / "out", "gptq", "nvfp4")
    with pytest.raises(UsageError, match="no format 'exl2' to write"):
        write(LLAMA, tmp_path / "out", "exl2", "nvfp4")
    assert not (tmp_path / "out").exists()
