"""Dtypes are accepted by their common names wherever a dtype is given."""

from __future__ import annotations

import pytest
import torch

import gristmill
from gristmill.kernel_registry import DTYPES, Axis, AxisError, canonical_dtype, default_registry
from gristmill.kernel_registry.dtypes import TORCH_NAMES
from gristmill.kernels import dtype_name, torch_dtype
from gristmill.runtime.errors import UsageError
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.loader.load import parse_dtype, parse_scheme
from tests.runtime.oracle import LLAMA, MODELS

NAMES = {
    "fp32": ("fp32", "float32", "float", "FLOAT32", "torch.float32", torch.float32, torch.float),
    "fp16": ("fp16", "float16", "half", "torch.half", torch.float16, torch.half),
    "bf16": ("bf16", "bfloat16", "BF16", "torch.bfloat16", torch.bfloat16),
    "fp8": ("fp8", "fp8_e4m3", "float8_e4m3fn", torch.float8_e4m3fn),
    "int64": ("int64", "long", torch.long),
}
UNKNOWN = ("float64", "fp31", "", "torch.", torch.float64, torch.strided)


@pytest.mark.parametrize("short", NAMES)
def test_every_name_is_the_short_one(short: str) -> None:
    assert {canonical_dtype(name) for name in NAMES[short]} == {short}


def test_every_short_name_has_its_torch_dtype() -> None:
    for short in DTYPES:
        dtype = torch_dtype(short)
        assert dtype is getattr(torch, TORCH_NAMES[short]) is torch_dtype(str(dtype))
        assert dtype_name(dtype) == canonical_dtype(dtype) == short


@pytest.mark.parametrize("name", UNKNOWN, ids=str)
def test_unknown_names_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="unknown dtype .*; known: .*bfloat16"):
        canonical_dtype(name)


@pytest.mark.parametrize("value", (32, None, torch.zeros(1), float), ids=str)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="a dtype is a name such as 'bfloat16' or a torch.dtype"):
        canonical_dtype(value)


@pytest.mark.parametrize("short", ("fp32", "fp16", "bf16"))
def test_problems_and_schemes(short: str) -> None:
    op = default_registry().op("linear")
    expected = op.problem(f"m=1,n=8,k=8,x={short},w={short}")
    for name in NAMES[short]:
        problem = op.problem({"m": 1, "n": 8, "k": 8, "x": name, "w": name})
        assert problem == expected and str(problem) == str(expected)
        assert gristmill.QuantScheme.parse(name).name == short
        if isinstance(name, str):
            assert op.problem(f"m=1,n=8,k=8,x={name},w={name}") == expected


def test_a_dtype_that_an_axis_does_not_take() -> None:
    axis = Axis("x", "dtype", "dtype of x", choices=("fp16", "bf16"))
    assert axis.parse("half", "op") == "fp16"
    for wrong in ("float32", "int4", 3, None, torch.int8):
        with pytest.raises(AxisError, match="wants a dtype, one of fp16, bf16, got"):
            axis.check(wrong, "op")


@pytest.mark.parametrize("wrong", (torch.float8_e4m3fn, "float8_e4m3fn", torch.int8, "half.fp8"), ids=str)
def test_only_dense_dtypes_are_schemes(wrong: object) -> None:
    """An fp8 dtype does not say how it is scaled. The scheme `fp8` does, and the dtype must not stand for it."""
    with pytest.raises(ValueError, match="scheme"):
        gristmill.QuantScheme.parse(wrong)
    assert gristmill.QuantScheme.parse("fp8").granularity == "tensor"


@pytest.mark.parametrize("short", ("fp32", "fp16", "bf16"))
def test_quantize_and_the_loader(short: str) -> None:
    config = load_config(MODELS / LLAMA)
    for name in NAMES[short]:
        assert gristmill.quantize(torch.ones(2, 4), name).scheme.name == short  # type: ignore[arg-type]
        assert parse_dtype(name, config) is torch_dtype(short)  # type: ignore[arg-type]
        assert str(parse_scheme(name)) == short  # type: ignore[arg-type]
    for wrong in ("int8", "fp8", torch.float64, 3):
        with pytest.raises(UsageError, match="unknown dtype .*; known: auto, fp32, fp16, bf16"):
            parse_dtype(wrong, config)  # type: ignore[arg-type]
    assert parse_dtype("auto", config) is torch.bfloat16


def test_a_packed_weight_writes_the_short_name() -> None:
    stored = gristmill.LinearWeight.pack(torch.ones(16, 32), ["dense_v1"])
    assert stored.problem(torch.bfloat16) == stored.problem("bfloat16") == stored.problem("bf16")
    assert "x=bf16" in stored.problem("bfloat16") and stored.layouts == {"dense_v1"}


@pytest.mark.parametrize("short", ("fp32", "fp16", "bf16"))
def test_dequantize_to_a_name(short: str) -> None:
    stored = gristmill.quantize(torch.randn(4, 32), "int4_g32")
    for name in NAMES[short]:
        assert torch.equal(stored.dequantize(name), stored.dequantize(torch_dtype(short)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dequantize rounds to fp32, fp16, bf16, got 'int8'"):
        stored.dequantize("int8")
