"""The primitives of gm_cpu.h at every level: conversions for all bit patterns, exp to 2 ulp over its whole range."""

from __future__ import annotations

import json
import shutil
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.native import compiled_library

from .levels import runnable_levels

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "native" / "primitives.cpp"
CODES = {torch.float16: 1, torch.bfloat16: 2}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def flags_of(level: str) -> list[str]:
    """The ISA flags of a level, as CMake wrote them into the compile commands of rms_norm."""
    database = ROOT / "build" / "compile_commands.json"
    if not database.is_file():
        pytest.skip("no build tree: run `make build`")
    for entry in json.loads(database.read_text()):
        if entry["file"].endswith("_rms_norm_cpu.cpp") and f"-DGM_LEVEL={level} " in entry["command"]:
            return [word for word in entry["command"].split() if word.startswith(("-m", "-f", "-std", "-O"))]
    raise AssertionError(f"rms_norm is not compiled at {level}")


@pytest.fixture(scope="module", params=runnable_levels())
def lib(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    level = request.param
    out = tmp_path_factory.mktemp("primitives") / f"{level}.so"
    flags = [*flags_of(level), f"-DGM_LEVEL={level}", "-Wno-psabi", "-Wno-maybe-uninitialized"]
    flags = [word for word in flags if word != "-fvisibility=hidden"] + ["-Wl,--allow-shlib-undefined"]
    library = compiled_library.load(out, SOURCE, flags=flags, folders=[ROOT / "kernels" / "_native"])
    signatures = {
        "t_exp": (c_void_p, c_void_p, c_int64),
        "t_narrow": (c_void_p, c_void_p, c_void_p, c_int64, c_int),
        "t_widen": (c_void_p, c_void_p, c_void_p, c_int64, c_int),
        "t_reduce": (c_void_p, c_void_p),
    }
    functions = {}
    for name, arguments in signatures.items():
        functions[name] = library[f"{name}__{level}"]
        functions[name].argtypes = arguments
    return functions


@pytest.mark.parametrize("dtype", CODES)
def test_widen_every_pattern(lib: dict[str, Any], dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    expected = bits.view(dtype).float()
    vector, scalar = torch.empty(1 << 16), torch.empty(1 << 16)
    assert lib["t_widen"](bits.data_ptr(), vector.data_ptr(), scalar.data_ptr(), 1 << 16, CODES[dtype]) == 0
    finite = ~expected.isnan()
    for widened in (vector, scalar):
        assert torch.equal(widened[finite].view(torch.int32), expected[finite].view(torch.int32))
        assert widened[~finite].isnan().all()


@pytest.mark.parametrize("dtype", CODES)
def test_narrow_rounds_to_nearest_even(lib: dict[str, Any], dtype: torch.dtype) -> None:
    # Every 16-bit value, the midpoints to its successor, and their float32 neighbours: every point where
    # rounding changes.
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).float()
    if dtype is torch.bfloat16:
        middle = values.view(torch.int32) + 0x8000
    else:
        successor = (
            (torch.arange(1 << 16, dtype=torch.int32) + 1).clamp(max=0xFFFF).to(torch.uint16).view(dtype)
        )
        middle = ((values.double() + successor.double()) / 2).float().view(torch.int32)
    points = torch.cat([values.view(torch.int32), middle, middle - 1, middle + 1]).view(torch.float32)
    extra = torch.tensor(
        [
            0.0,
            -0.0,
            65504.0,
            65519.996,
            65520.0,
            1e30,
            -1e30,
            float("inf"),
            -float("inf"),
            1e-45,
            2**-25,
            2**-24,
            6e-8,
        ]
    )
    x = torch.cat([points, extra, torch.zeros(16 - (points.numel() + extra.numel()) % 16)])
    expected = x.to(dtype)
    vector, scalar = (torch.empty(x.numel(), dtype=torch.uint16) for _ in range(2))
    assert lib["t_narrow"](x.data_ptr(), vector.data_ptr(), scalar.data_ptr(), x.numel(), CODES[dtype]) == 0
    nan = x.isnan()
    for narrowed in (vector, scalar):
        wrong = (narrowed.view(torch.int16) != expected.view(torch.int16)) & ~nan
        assert not wrong.any(), (x[wrong][:5], narrowed.view(dtype)[wrong][:5], expected[wrong][:5])
        assert narrowed.view(dtype)[nan].isnan().all()


def test_exp_within_two_ulp(lib: dict[str, Any]) -> None:
    x = np.concatenate([np.linspace(-103.9, 88.72, 400_003), np.linspace(-1e-3, 1e-3, 10_001)]).astype(
        np.float32
    )
    out = np.empty_like(x)
    assert lib["t_exp"](x.ctypes.data, out.ctypes.data, x.size) == 0
    expected = np.exp(x.astype(np.float64))
    ulp = np.spacing(expected.astype(np.float32)).astype(np.float64)
    assert (np.abs(out - expected) / ulp).max() <= 2.0


def test_exp_edges(lib: dict[str, Any]) -> None:
    x = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 88.9, 1e30, -104.0, -200.0, -1e30, 1e-40], dtype=np.float32
    )
    out = np.empty_like(x)
    lib["t_exp"](x.ctypes.data, out.ctypes.data, x.size)
    assert out[0] == out[1] == 1 and out[2] == np.inf and out[3] == 0 and np.isnan(out[4])
    assert out[5] == out[6] == np.inf and (out[7:10] == 0).all() and out[10] == 1


def test_reductions(lib: dict[str, Any]) -> None:
    x = np.array([(-1) ** i * (i + 1) for i in range(16)], dtype=np.float32)
    out = np.empty(2, dtype=np.float32)
    lanes = lib["t_reduce"](x.ctypes.data, out.ctypes.data)
    assert lanes in (4, 8, 16)
    assert out[0] == x[:lanes].sum() and out[1] == x[:lanes].max()
