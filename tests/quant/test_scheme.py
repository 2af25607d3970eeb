"""Scheme names: they parse, print back, count bytes as QuantTensor does, and refuse unknown names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gristmill.kernel_registry.scheme import (
    ACTIVATION_FORMATS,
    ALL_SCHEMES,
    ALL_WEIGHT_SCHEMES,
    PAIRED_SCHEMES,
    QuantScheme,
)
from gristmill.quant import quantize
from tests.quant.oracle import weight

WEIGHTS = [
    "fp32",
    "fp16",
    "bf16",
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int4_ch",
    "int4_g32_zp",
    "int4_g64_zp",
    "int4_g128_zp",
    "int4_ch_zp",
    "int8_ch",
    "int8_g128",
    "fp8",
    "fp8_ch",
    "fp8_block",
    "mxfp8",
    "mxfp4",
    "nvfp4",
]


def test_the_names_are_the_contracts() -> None:
    assert sorted(ALL_WEIGHT_SCHEMES) == sorted(WEIGHTS)
    assert set(PAIRED_SCHEMES) < set(ALL_SCHEMES)
    assert len(ALL_SCHEMES) == len(set(ALL_SCHEMES)) == 19 + 16 * len(ACTIVATION_FORMATS)


@pytest.mark.parametrize("name", ALL_SCHEMES)
def test_names_print_back(name: str) -> None:
    scheme = QuantScheme.parse(name)
    assert str(scheme) == scheme.name == name
    assert QuantScheme.parse(scheme) is scheme
    assert scheme.weights == name.split(".")[0]
    assert str(scheme.without_activation) == scheme.weights


@pytest.mark.parametrize(
    "name, weight_format, bits, group, symmetric, scales, activation",
    [
        ("nvfp4", "nvfp4", 4, 16, True, "e4m3", None),
        ("nvfp4.nvfp4", "nvfp4", 4, 16, True, "e4m3", "nvfp4"),
        ("fp8_block.fp8_g128", "fp8", 8, 128, True, "fp32", "fp8_g128"),
        ("int4_g128.fp8_token", "int4", 4, 128, True, "bf16", "fp8_token"),
        ("int4_ch_zp", "int4", 4, None, False, "bf16", None),
        ("int8_ch.int8_token", "int8", 8, None, True, "bf16", "int8_token"),
        ("mxfp4.mxfp8", "mxfp4", 4, 32, True, "e8m0", "mxfp8"),
        ("fp8", "fp8", 8, 0, True, None, None),
        ("fp16", "fp16", 16, None, True, None, None),
    ],
)
def test_fields(name, weight_format, bits, group, symmetric, scales, activation) -> None:
    s = QuantScheme.parse(name)
    assert (s.weight, s.bits, s.group_size, s.symmetric, s.scale_dtype, s.activation) == (
        weight_format,
        bits,
        group,
        symmetric,
        scales,
        activation,
    )


@pytest.mark.parametrize(
    "bad, message",
    [
        ("int4", "no weight format 'int4'"),
        ("int4_g128.int4", "no activation format 'int4'"),
        ("bf16.fp8", "not quantized"),
        ("mxfp4_zp", "no weight format"),
        ("", "no weight format ''"),
        ("fp8.", "no activation format ''"),
        ("INT4_G128", "no weight format"),
    ],
)
def test_unknown_names(bad: str, message: str) -> None:
    with pytest.raises(ValueError, match="scheme") as error:
        QuantScheme.parse(bad)
    assert message in str(error.value)
    if "not quantized" not in message:
        assert all(name in str(error.value) for name in WEIGHTS)


def test_a_name_is_a_string() -> None:
    with pytest.raises(TypeError, match="got int"):
        QuantScheme.parse(4)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALL_WEIGHT_SCHEMES)
def test_bytes_are_those_of_the_tensor(name: str) -> None:
    for n, k in ((200, 384), (5, 256)):
        assert QuantScheme.parse(name).weight_bytes(n, k) == quantize(weight(n, k), name).nbytes
    big = QuantScheme.parse(name)
    assert 8 * big.weight_bytes(8192, 8192) / 8192**2 == pytest.approx(big.bits_per_weight, rel=2e-3)


def test_odd_k() -> None:
    assert QuantScheme.parse("int4_ch").weight_bytes(3, 7) == 3 * 4 + 3 * 2
    assert QuantScheme.parse("fp8_block").weight_bytes(129, 129) == 129 * 129 + 4 * 4
    assert QuantScheme.parse("int4_g128").requires_k_multiple == 128
    assert QuantScheme.parse("fp8_block").requires_k_multiple == 1


def test_integer_widths_without_a_name() -> None:
    scheme = QuantScheme.integer(3, 64, zero_points=True)
    assert scheme.name == "int3_g64_zp"
    assert scheme.code_bytes(64) == 24
    assert QuantScheme.integer(5, None).implicit_zero == 16
    with pytest.raises(ValueError, match="1 to 8 bits, got 9"):
        QuantScheme.integer(9, 64)
    with pytest.raises(ValueError, match="group_size"):
        QuantScheme.integer(4, 0)


def test_specs_import_no_torch() -> None:
    code = (
        "import sys, gristmill.kernel_registry.scheme, gristmill.kernel_registry.layout\n"
        "import gristmill.quant.layouts.plain_v1, gristmill.quant.layouts.cpu_rows16_v1\n"
        "import gristmill.quant.layouts.dense_v1\n"
        "print([m for m in ('torch', 'numpy', 'triton') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "name, act_order, expected",
    [
        ("int4_g128", False, "int4_g128.int8_g128"),
        ("int4_g64_zp", False, "int4_g64_zp.int8_g32"),
        ("int4_ch", False, "int4_ch.int8_g128"),
        ("int4_g128", True, "int4_g128.int8_token"),
        ("nvfp4", False, "nvfp4.int8_g32"),
        ("int4_g128.fp8_token", False, "int4_g128.fp8_token"),
        ("fp8_block", False, "fp8_block"),
        ("int3_g128", False, "int3_g128"),
        ("bf16", False, "bf16"),
    ],
)
def test_int8_activations_follow_the_groups(name: str, act_order: bool, expected: str) -> None:
    assert str(QuantScheme.parse(name).with_int8_activation(act_order)) == expected
