"""The Hopper kernels over frag16 layouts without a GPU: what they take, configurations that fit, the library's own arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear import frag16_fed_shapes as fed_shapes
from gristmill.kernels.linear import frag16_shapes as shapes
from gristmill.kernels.linear import linear_w4a16_fed_sm90 as fed
from gristmill.kernels.linear import linear_w4a16_sm90 as spec
from gristmill.kernels.linear import linear_w8a16_fed_sm90 as wide_fed
from gristmill.kernels.linear import linear_w8a16_sm90 as wide
from gristmill.kernels.native import cuda_function, library_dir

OP = default_registry().op("linear")
TARGET = Target.parse("sm_90")
FOLDER = Path(spec.__file__).parent
BUILT = (library_dir() / "libgristmill_cuda_sm90a.so").is_file()
SCHEMES = tuple(
    scheme for name in ("w4", "f4", "w8") for scheme in default_registry().layout(f"{name}_frag16_v1").schemes
)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,n=64,k=256,w=int4_g128", None),
        ("m=16,n=18,k=128,x=fp16,w=int4_g128,epilogue=bias+residual+silu_mul", None),
        ("m=0,n=64,k=256,w=int4_g128", None),
        ("m=17,n=64,k=256,w=int4_g128", "M <= 16"),
        ("m=16,n=33,k=144,w=nvfp4", None),
        ("m=17,n=64,k=256,w=mxfp4", "M <= 16"),
        ("m=1,n=64,k=256,x=fp32,w=int4_g128", "fp16 or bf16"),
        ("m=1,n=64,k=256,w=int4_g64_zp,act_order=true", None),
        ("m=1,n=64,k=129,w=int4_ch", None),
        ("m=1,n=64,k=256,w=int8_ch", "4 bits, not int8_ch"),
        ("m=1,n=64,k=256,w=bf16", "4 bits, not bf16"),
        ("m=1,n=64,k=256,w=nvfp4.nvfp4", "weight-only"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    for kernel in (spec.KERNEL, fed.KERNEL):
        said = kernel.accepts(OP.problem(problem))
        assert said is None if reason is None else said is not None and reason in said


def test_eight_bits() -> None:
    for kernel in (wide.KERNEL, wide_fed.KERNEL):
        for scheme in ("int8_ch", "int8_g128", "fp8", "fp8_ch", "fp8_block"):
            assert kernel.accepts(OP.problem(f"m=3,n=33,k=384,w={scheme}")) is None
        assert "mxfp8" in (kernel.accepts(OP.problem("m=1,n=64,k=256,w=mxfp8")) or "")
        assert "8 bits" in (kernel.accepts(OP.problem("m=1,n=64,k=256,w=nvfp4")) or "")


def test_every_scheme_that_is_accepted_has_a_layout_and_the_bytes_agree() -> None:
    from gristmill.quant.layouts.w4_frag16_v1 import tile_bytes

    for kernel in (spec.KERNEL, wide.KERNEL, fed.KERNEL, wide_fed.KERNEL):
        layouts = [default_registry().layout(name) for name in kernel.layouts]
        for scheme in SCHEMES:
            taken = kernel.accepts(OP.problem(f"m=1,n=64,k=256,w={scheme}")) is None
            assert taken == any(layout.accepts(scheme) for layout in layouts), (kernel.name, scheme)
            assert shapes.format_of(QuantScheme.parse(scheme)).tile_bytes == tile_bytes(
                QuantScheme.parse(scheme)
            )


def test_hardware_is_hopper_alone() -> None:
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert spec.KERNEL.requires.check_hardware(Target.parse(name)), name
        assert fed.KERNEL.requires.check_hardware(Target.parse(name)), name
    assert not spec.KERNEL.requires.check_hardware(TARGET)
    assert not fed.KERNEL.requires.check_hardware(TARGET)


@pytest.mark.parametrize("m", [0, 1, 8, 9, 16])
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 128), (16, 256), (2112, 7168), (4096, 14336), (5120, 27648), (151936, 4096), (7168, 65536)],
)
@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "nvfp4", "fp8"])
def test_the_default_fits_and_is_among_those_to_try(scheme: str, m: int, n: int, k: int) -> None:
    problem, form = OP.problem(f"m={m},n={n},k={k},w={scheme}"), shapes.format_of(QuantScheme.parse(scheme))
    for kernel in (spec.KERNEL, fed.KERNEL):
        config = kernel.config(problem, TARGET)
        assert config == next(iter(kernel.space(problem, TARGET)))
        if kernel is fed.KERNEL:
            one = next(
                s
                for s in fed_shapes.shapes_of(form)
                if all(config[name] == value for name, value in s._asdict().items())
            )
            assert one.nt * 8 >= m and config["depth"] % one.wk == 0
            size = fed_shapes.shared_bytes(one, form.tile_bytes, int(config["split"]), int(config["depth"]))
        else:
            shape = next(
                s
                for s in shapes.shapes_of(form)
                if (s.nt, s.rt, s.wk) == tuple(config[name] for name in ("nt", "rt", "wk"))
            )
            assert shape.nt * 8 >= m
            size = shapes.shared_bytes(
                shape, form.tile_bytes, max(m, 1), k, int(config["split"]), int(config["depth"])
            )
        assert size < shapes.SHARED_BYTES
        estimate = kernel.estimate(problem, TARGET)
        assert estimate is not None and 0 < estimate < 1e4


@pytest.mark.parametrize(
    ("source", "few", "every", "key"),
    [
        ("_linear_frag16_entry_sm90.h", shapes.FEW, shapes.ALL, ("nt", "rt", "wk")),
        ("_linear_frag16_fed_entry_sm90.h", fed_shapes.FEW, fed_shapes.ALL, ("nt", "rt", "wn", "wk")),
    ],
)
def test_the_instances_are_those_of_the_source(
    source: str, few: tuple[tuple[int, ...], ...], every: tuple[tuple[int, ...], ...], key: tuple[str, ...]
) -> None:
    text = (FOLDER / source).read_text(encoding="utf-8")
    for name, expected in (("GM_FEW", few), ("GM_ALL", every[len(few) :])):
        listed = re.search(rf"#define {name}\(S, \.\.\.\)(.*?)\n(?:#define|\n)", text, re.S)
        assert listed is not None
        found = [
            tuple(int(v) for v in row.split(","))
            for row in re.findall(r"S\(__VA_ARGS__, ([\d, ]+)\)", listed[1])
        ]
        assert found == [tuple(shape) for shape in expected]
    keys = [tuple(getattr(shape, name) for name in key) for shape in every]
    assert len(set(keys)) == len(keys), "an instance is found by these"


@pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")
@pytest.mark.parametrize(
    "scheme",
    [
        "int4_g128",
        "int4_g64",
        "int4_g32",
        "int4_g128_zp",
        "int4_g64_zp",
        "int4_g32_zp",
        "mxfp4",
        "nvfp4",
        "int8_ch",
        "fp8_block",
    ],
)
def test_the_library_counts_the_same_shared_memory(scheme: str) -> None:
    from gristmill.kernels.linear._frag16_launch import ARGUMENTS, FED_ARGUMENTS

    form = shapes.format_of(QuantScheme.parse(scheme))
    entry = cuda_function(f"gm_linear_{form.name}_sm90", "sm_90a", ARGUMENTS)
    fed_entry = cuda_function(f"gm_linear_{form.name}_fed_sm90", "sm_90a", FED_ARGUMENTS)
    for dtype in (2, 1):
        for m, n, k in ((1, 4096, 4096), (9, 100, 1536), (16, 7168, 16384)):
            for shape, split, depth, size in shapes.candidates(form, m, n, k):
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
                    dtype,
                    2,
                    shape.nt,
                    shape.rt,
                    shape.wk,
                    split,
                    depth,
                    1,
                    -1,
                    None,
                    None,
                )
                assert said == size, (shape, split, depth)
            for one, split, depth, size in fed_shapes.candidates(form, m, n, k):
                said = fed_entry(
                    None, None, k, None, None, None, m, n, k, dtype, 2, *one, split, depth, 1, -1, None, None
                )
                assert said == size, (one, split, depth)


@pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"m": 9}, -2),
        ({"k": 0}, -2),
        ({"n": 0}, -2),
        ({"dtype": 0}, -1),
        ({"rt": 5}, -5),
        ({"split": 3}, -5),
        ({"depth": 0}, -5),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    from gristmill.kernels.linear._frag16_launch import ARGUMENTS

    given = {"m": 1, "n": 64, "k": 256, "dtype": 2, "rt": 2, "split": 1, "depth": 1} | changed
    entry = cuda_function("gm_linear_int4_g128_sm90", "sm_90a", ARGUMENTS)
    assert (
        entry(
            None,
            None,
            256,
            None,
            None,
            None,
            given["m"],
            given["n"],
            given["k"],
            given["dtype"],
            2,
            1,
            given["rt"],
            8,
            given["split"],
            given["depth"],
            1,
            -1,
            None,
            None,
        )
        == code
    )


@pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"m": 9}, -2),
        ({"k": 0}, -2),
        ({"n": 0}, -2),
        ({"dtype": 0}, -1),
        ({"rt": 5}, -5),
        ({"split": 3}, -5),
        ({"depth": 0}, -5),
        ({"depth": 6}, -5),
        ({"depth": 20}, -5),
        ({"x": 8}, -2),
        ({"ldx": 252}, -2),
        ({"ldx": 248}, -2),
    ],
)
def test_the_warp_specialised_one_refuses(changed: dict[str, int], code: int) -> None:
    """Depths that are no multiple of the slices along K among it: a slice that shared a slot with another would take it a pass too early."""
    from gristmill.kernels.linear._frag16_launch import FED_ARGUMENTS

    given = {
        "m": 1,
        "n": 64,
        "k": 256,
        "dtype": 2,
        "rt": 7,
        "split": 1,
        "depth": 4,
        "x": 0,
        "ldx": 256,
    } | changed
    entry = cuda_function("gm_linear_int4_g128_fed_sm90", "sm_90a", FED_ARGUMENTS)
    assert (
        entry(
            None,
            given["x"],
            given["ldx"],
            None,
            None,
            None,
            given["m"],
            given["n"],
            given["k"],
            given["dtype"],
            2,
            1,
            given["rt"],
            2,
            4,
            given["split"],
            given["depth"],
            1,
            -1,
            None,
            None,
        )
        == code
    )
