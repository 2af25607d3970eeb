"""Embedding and logits head: a tied matrix in memory once, and both quantized on request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.quant import quantize
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA, MODELS, NAMES

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS, HIDDEN = 4096, 256


def directory(name: str, folder: Path, scheme: str | None = None, untied: bool = False) -> Path:
    """A model whose embedding and head have the values of a scheme. untied: the head is a matrix of its own, other values."""
    shutil.copytree(MODELS / name, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if EMBEDDING not in tensors:
            continue
        if untied:
            tensors[HEAD] = tensors[EMBEDDING].roll(1, 0).contiguous()
        for matrix in (EMBEDDING, HEAD):
            if matrix in tensors and scheme is not None:
                tensors[matrix] = quantize(tensors[matrix], scheme).dequantize()
        save_file(tensors, file, metadata={"format": "pt"})
    if untied:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weights = json.loads(index.read_text())
            weights["weight_map"][HEAD] = weights["weight_map"][EMBEDDING]
            index.write_text(json.dumps(weights))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_tied_matrix_is_kept_once(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    tied, untied = make(name), make(directory(name, tmp_path / "untied", untied=True))
    assert untied.weight_bytes - tied.weight_bytes == ROWS * HIDDEN * 4
    ids = torch.tensor([0, 17, 4095, 17])
    matrix = next(
        tensors[EMBEDDING]
        for file in (MODELS / name).glob("*.safetensors")
        if EMBEDDING in (tensors := load_file(file))
    )
    for llm in (tied, untied):
        assert torch.equal(llm.model.embedding(ids), matrix[ids].float())  # type: ignore[attr-defined]


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("given", "scheme"), [("int8", "int8_g128"), ("int8_ch", "int8_ch"), ("int4_g128", "int4_g128")]
)
def test_both_are_quantized(
    given: str, scheme: str, untied: bool, make: Callable[..., LLM], tmp_path: Path
) -> None:
    """As a model whose matrices were rounded before."""
    ids = oracle.window(0)[:64]
    original = directory(LLAMA, tmp_path / "floats", untied=untied)
    rounded = make(directory(LLAMA, tmp_path / "rounded", scheme, untied))
    mine, floats = make(original, quant_head=given), make(original)
    expected = window_logits(rounded.engine, ids)

    def error(llm: LLM) -> float:
        return float((window_logits(llm.engine, ids) - expected).abs().max() / expected.abs().max())

    assert error(mine) < 1e-5 and error(floats) > 1e-3  # planted fault: matrices in floats
    count = 2 if untied else 1
    saved = floats.weight_bytes - mine.weight_bytes
    size = quantize(torch.randn(ROWS, HIDDEN), scheme).nbytes
    assert saved == count * (ROWS * HIDDEN * 4 - size)
    assert mine.generate([ids[:8]])[0].token_ids == rounded.generate([ids[:8]])[0].token_ids


def test_what_is_refused(make: Callable[..., LLM]) -> None:
    for given, says in (
        ("int5", "unknown scheme 'int5'"),
        ("bf16", "quant_head must be int8 or a weight-only scheme"),
        ("int8_ch.int8_token", "quant_head must be int8 or a weight-only scheme"),
    ):
        with pytest.raises(UsageError, match=says):
            make(LLAMA, quant_head=given)
