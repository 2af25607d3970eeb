"""linear_w4a16_tma_sm90 without a GPU: what it takes, configurations that fit, and the compiled library's own arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear import linear_w4a16_tma_sm90 as spec
from gristmill.kernels.native import cuda_function, library_dir

OP = default_registry().op("linear")
TARGET = Target.parse("sm_90")
SOURCE = Path(spec.__file__).with_name("_linear_w4a16_tma_sm90.cu")
needs_library = pytest.mark.skipif(
    not (library_dir() / "libgristmill_cuda_sm90a.so").is_file(), reason="the CUDA library is not built: needs nvcc"
)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,n=64,k=256,w=int4_g128", None),
        ("m=100000,n=17,k=128,x=fp16,w=int4_g128,epilogue=bias+residual+silu_mul", None),
        ("m=0,n=64,k=256,w=int4_g128", None),
        ("m=64,n=64,k=256,x=fp32,w=int4_g128", "fp16 or bf16"),
        ("m=64,n=64,k=256,w=int4_g64", "int4_g128, not int4_g64"),
        ("m=64,n=64,k=256,w=int4_g128,act_order=true", "no act-order"),
        ("m=64,n=64,k=200,w=int4_g128", "multiple of 128"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    said = spec.accepts(OP.problem(problem))
    assert said is None if reason is None else said is not None and reason in said


def test_hardware_is_hopper_alone() -> None:
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert spec.KERNEL.requires.check_hardware(Target.parse(name)), name
    assert not spec.KERNEL.requires.check_hardware(TARGET)


@pytest.mark.parametrize("m", [0, 1, 17, 64, 65, 128, 257, 1000, 4096, 20000])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (16, 256), (2112, 7168), (4096, 14336), (5120, 27648), (151936, 4096)])
def test_the_default_is_the_first_to_try_and_says_its_workspace(m: int, n: int, k: int) -> None:
    problem = OP.problem(f"m={m},n={n},k={k},w=int4_g128")
    config = spec.config(problem, TARGET)
    assert config == next(iter(spec.space(problem, TARGET)))
    estimate = spec.estimate(problem, TARGET)
    assert estimate is not None and 0 < estimate < 1e5
    room = spec.workspace(problem, config)
    assert room.bytes == spec.scratch_bytes(config) and room.zeroed == bool(config["even"])
    assert room.bytes < 1 << 25


def test_the_instances_are_those_of_the_source() -> None:
    listed = re.search(r"#define GM_SHAPES\(S\)(.*?)\n#define", SOURCE.read_text(encoding="utf-8"), re.S)
    assert listed is not None
    found = [tuple(int(v) for v in row.split(",")) for row in re.findall(r"S\(([\d, ]+)\)", listed[1])]
    assert [row[:5] for row in found] == [tuple(shape) for shape in spec.SHAPES]


def _call(**changed: int) -> int:
    given = {"m": 64, "n": 64, "k": 256, "ldx": 256, "dtype": 2, "scales": 2, "mt": 64, "c": 2, "split": 1, "grid": 132,
             "raster": 1, "even": 0, "device": -1} | changed  # fmt: skip
    entry = cuda_function("gm_linear_w4a16_tma_sm90", "sm_90a", spec.ARGUMENTS)
    return int(entry(None, None, given["ldx"], None, None, None, None, given["m"], given["n"], given["k"], given["dtype"],
                     given["scales"], given["mt"], given["c"], given["split"], given["grid"], given["raster"], given["even"],
                     1, given["device"], None))  # fmt: skip


@needs_library
def test_every_instance_fits_a_multiprocessor() -> None:
    for shape in spec.SHAPES:
        size = _call(mt=shape.mt, c=shape.c)
        rings = shape.xs * shape.mt * 128 + shape.ws * shape.c * 4 * spec.TILE_BYTES
        sums = shape.mt * shape.c * 256  # of a cluster's CTAs, in the place of the rings
        assert sums <= rings < size and (size + 1024) * shape.ctas <= 228 * 1024, shape


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"mt": 48}, -5),
        ({"c": 3}, -5),
        ({"split": 3}, -5),
        ({"mt": 32, "split": 8}, -5),
        ({"grid": 0}, -5),
        ({"grid": 5000}, -5),
        ({"raster": 0}, -5),
        ({"m": -1}, -2),
        ({"k": 200}, -2),
        ({"n": 0}, -2),
        ({"ldx": 250}, -2),
        ({"ldx": 260}, -2),
        ({"dtype": 0}, -1),
        ({"scales": 3}, -1),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert _call(**changed) == code
