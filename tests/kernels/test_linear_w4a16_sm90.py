"""linear_w4a16_sm90 without a GPU: what it takes, configurations that fit, and the compiled library's own arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear import linear_w4a16_sm90 as spec
from gristmill.kernels.linear import linear_w4a16_wgmma_sm90 as wgmma
from gristmill.kernels.native import cuda_function, library_dir

OP = default_registry().op("linear")
TARGET = Target.parse("sm_90")
SOURCE = Path(spec.__file__).with_name("_linear_w4a16_sm90.cu")
BUILT = (library_dir() / "libgristmill_cuda_sm90a.so").is_file()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,n=64,k=256,w=int4_g128", None),
        ("m=16,n=17,k=128,x=fp16,w=int4_g128,epilogue=bias+residual+silu_mul", None),
        ("m=0,n=64,k=256,w=int4_g128", None),
        ("m=17,n=64,k=256,w=int4_g128", "M <= 16"),
        ("m=1,n=64,k=256,x=fp32,w=int4_g128", "fp16 or bf16"),
        ("m=1,n=64,k=256,w=int4_g64", "int4_g128, not int4_g64"),
        ("m=1,n=64,k=256,w=int4_g128,act_order=true", "no act-order"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    said = spec.accepts(OP.problem(problem))
    assert said is None if reason is None else said is not None and reason in said


def test_wgmma_accepts_more_rows() -> None:
    assert wgmma.accepts(OP.problem("m=256,n=64,k=256,w=int4_g128")) is None
    assert "M <= 256" in (wgmma.accepts(OP.problem("m=257,n=64,k=256,w=int4_g128")) or "")


def test_hardware_is_hopper_alone() -> None:
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert spec.KERNEL.requires.check_hardware(Target.parse(name)), name
    assert not spec.KERNEL.requires.check_hardware(TARGET)


@pytest.mark.parametrize("m", [0, 1, 3, 8, 9, 16])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 128), (16, 256), (2112, 7168), (4096, 14336), (5120, 27648), (151936, 4096), (7168, 65536)]
)
def test_the_default_fits_and_is_among_those_to_try(m: int, n: int, k: int) -> None:
    problem = OP.problem(f"m={m},n={n},k={k},w=int4_g128")
    config = spec.config(problem, TARGET)
    assert config == next(iter(spec.space(problem, TARGET)))
    shape = next(
        s for s in spec.SHAPES if (s.nt, s.rt, s.wn, s.wk) == tuple(config[key] for key in ("nt", "rt", "wn", "wk"))
    )
    assert shape.nt * 8 >= m
    assert spec.shared_bytes(shape, max(m, 1), k, int(config["split"]), int(config["depth"])) < spec.SHARED_BYTES
    estimate = spec.estimate(problem, TARGET)
    assert estimate is not None and 0 < estimate < 1e4


def test_the_instances_are_those_of_the_source() -> None:
    listed = re.search(r"#define GM_SHAPES\(S\)(.*?)\n#define", SOURCE.read_text(encoding="utf-8"), re.S)
    assert listed is not None
    found = [tuple(int(v) for v in row.split(",")) for row in re.findall(r"S\(([\d, ]+)\)", listed[1])]
    assert found == [tuple(shape) for shape in spec.SHAPES]


@pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")
def test_the_library_counts_the_same_shared_memory() -> None:
    entry = cuda_function("gm_linear_w4a16_sm90", "sm_90a", spec.ARGUMENTS)
    for m, n, k in ((1, 4096, 4096), (9, 100, 1536), (16, 7168, 16384)):
        for shape, split, depth, size in spec.candidates(m, n, k):
            said = entry(
                None,
                None,
                k,
                None,
                None,
                None,
                m,
                n,
                k,
                2,
                2,
                shape.nt,
                shape.rt,
                shape.wn,
                shape.wk,
                split,
                depth,
                1,
                -1,
                None,
            )
            assert said == size, (shape, split, depth)


@pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")
def test_wgmma_counts_the_same_shared_memory_and_instances() -> None:
    listed = re.search(
        r"#define GM_SHAPES\(S\)(.*?)\n#define", SOURCE.with_name("_linear_w4a16_wgmma_sm90.cu").read_text(), re.S
    )
    assert listed is not None
    found = [tuple(int(v) for v in row.split(",")) for row in re.findall(r"S\(([\d, ]+)\)", listed[1])]
    assert found == [tuple(shape[:5]) for shape in wgmma.SHAPES]
    entry = cuda_function("gm_linear_w4a16_wgmma_sm90", "sm_90a", spec.ARGUMENTS)
    for m, n, k in ((1, 4096, 4096), (33, 100, 1536), (64, 7168, 16384)):
        for shape, split, depth, size in wgmma.candidates(m, n, k):
            said = entry(
                None,
                None,
                k,
                None,
                None,
                None,
                m,
                n,
                k,
                2,
                2,
                shape.nt,
                shape.rb,
                shape.wn,
                shape.wk,
                split,
                depth,
                1,
                -1,
                None,
            )
            assert said == size, (shape, split, depth)


@pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"m": 9}, -2),
        ({"k": 100}, -2),
        ({"n": 0}, -2),
        ({"dtype": 0}, -1),
        ({"rt": 5}, -5),
        ({"split": 3}, -5),
        ({"depth": 0}, -5),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    given = {"m": 1, "n": 64, "k": 256, "dtype": 2, "rt": 2, "split": 1, "depth": 1} | changed
    entry = cuda_function("gm_linear_w4a16_sm90", "sm_90a", spec.ARGUMENTS)
    assert entry(None, None, 256, None, None, None, given["m"], given["n"], given["k"], given["dtype"], 2, 1, given["rt"], 1, 8,
                 given["split"], given["depth"], 1, -1, None) == code  # fmt: skip
