"""The many-row kernels over frag16 tiles without a GPU: what they take, configurations that fit, the library's own arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear import frag16_tma_shapes as shapes
from gristmill.kernels.linear import linear_w4a16_tma_sm90 as spec
from gristmill.kernels.linear import linear_w8a16_tma_sm90 as wide
from gristmill.kernels.linear.frag16_shapes import format_of
from gristmill.kernels.native import cuda_function, library_dir

OP = default_registry().op("linear")
TARGET = Target.parse("sm_90")
FOLDER = Path(spec.__file__).parent
SCHEMES = tuple(
    scheme for name in ("w4", "f4", "w8") for scheme in default_registry().layout(f"{name}_frag16_v1").schemes
)
FORMATS = tuple(dict.fromkeys(format_of(QuantScheme.parse(scheme)) for scheme in SCHEMES))
needs_library = pytest.mark.skipif(
    not (library_dir() / "libgristmill_cuda_sm90a.so").is_file(),
    reason="the CUDA library is not built: needs nvcc",
)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,n=64,k=256,w=int4_g128", None),
        ("m=100000,n=18,k=128,x=fp16,w=int4_g128,epilogue=bias+residual+silu_mul", None),
        ("m=0,n=64,k=256,w=int4_g128", None),
        ("m=64,n=64,k=256,w=int4_g64_zp,act_order=true", None),
        ("m=64,n=64,k=208,w=nvfp4", None),
        ("m=64,n=64,k=129,w=int4_ch", None),
        ("m=64,n=64,k=256,x=fp32,w=int4_g128", "fp16 or bf16"),
        ("m=64,n=64,k=256,w=int8_ch", "4 bits, not int8_ch"),
        ("m=64,n=64,k=256,w=nvfp4.nvfp4", "weight-only"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    said = spec.KERNEL.accepts(OP.problem(problem))
    assert said is None if reason is None else said is not None and reason in said


def test_every_scheme_that_is_accepted_has_a_layout() -> None:
    for kernel in (spec.KERNEL, wide.KERNEL):
        layouts = [default_registry().layout(name) for name in kernel.layouts]
        for scheme in SCHEMES:
            taken = kernel.accepts(OP.problem(f"m=64,n=64,k=256,w={scheme}")) is None
            assert taken == any(layout.accepts(scheme) for layout in layouts), (kernel.name, scheme)


def test_hardware_is_hopper_alone() -> None:
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert spec.KERNEL.requires.check_hardware(Target.parse(name)), name
    assert not spec.KERNEL.requires.check_hardware(TARGET)


@pytest.mark.parametrize("m", [0, 1, 17, 64, 65, 128, 257, 1000, 4096, 20000])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 128), (16, 256), (2112, 7168), (4096, 14336), (5120, 27648), (151936, 4096)]
)
@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4", "int4_g32_zp"])
def test_the_default_is_the_first_to_try_and_says_its_workspace(scheme: str, m: int, n: int, k: int) -> None:
    problem = OP.problem(f"m={m},n={n},k={k},w={scheme}")
    config = spec.KERNEL.config(problem, TARGET)
    assert config == next(iter(spec.KERNEL.space(problem, TARGET)))
    estimate = spec.KERNEL.estimate(problem, TARGET)
    assert estimate is not None and 0 < estimate < 1e5
    room = spec.KERNEL.workspace(problem, config)
    assert room.bytes == shapes.scratch_bytes(config) and room.zeroed == bool(config["even"])
    assert room.bytes < 1 << 25


def test_the_instances_are_those_of_the_source() -> None:
    text = (FOLDER / "_linear_frag16_tma_entry_sm90.h").read_text(encoding="utf-8")
    for name, expected in (("GM_FEW", shapes.FEW), ("GM_ALL", shapes.ALL[len(shapes.FEW) :])):
        listed = re.search(rf"#define {name}\(S, \.\.\.\)(.*?)\n(?:#define|\n)", text, re.S)
        assert listed is not None
        found = [
            tuple(int(v) for v in row.split(","))
            for row in re.findall(r"S\(__VA_ARGS__, ([\d, ]+)\)", listed[1])
        ]
        assert found == [tuple(shape) for shape in expected]
    keys = [shape[:4] for shape in shapes.ALL]
    assert len(set(keys)) == len(keys), "an instance is found by these four"


def _call(form: str = "int4_g128", **changed: int) -> int:
    from gristmill.kernels.linear._frag16_launch import TMA_ARGUMENTS

    given = {
        "m": 64,
        "n": 64,
        "k": 256,
        "ldx": 256,
        "dtype": 2,
        "scales": 2,
        "mt": 64,
        "c": 2,
        "slices": 1,
        "ctas": 2,
        "split": 1,
        "grid": 132,
        "raster": 1,
        "even": 0,
        "lag": 0,
        "device": -1,
    } | changed
    entry = cuda_function(f"gm_linear_{form}_tma_sm90", "sm_90a", TMA_ARGUMENTS)
    return int(
        entry(
            None,
            None,
            given["ldx"],
            *[None] * 5,
            given["m"],
            given["n"],
            given["k"],
            given["dtype"],
            given["scales"],
            *(
                given[name]
                for name in ("mt", "c", "slices", "ctas", "split", "grid", "raster", "even", "lag")
            ),
            1,
            given["device"],
            None,
        )
    )


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_instance_fits_a_multiprocessor(form: shapes.Format) -> None:
    for dtype in (1, 2):
        for shape in shapes.shapes_of(form):
            for scales in (1, 2):
                key = dict(zip(("mt", "c", "slices", "ctas"), shape[:4], strict=True))
                size = _call(form.name, k=2048, ldx=2048, dtype=dtype, scales=scales, **key)
                slots = shape.ws4 if form.tile_bytes < 2000 else shape.ws8
                rings = shape.xs * shape.mt * 128 + slots * shape.c * 4 * form.tile_bytes
                sums = (
                    shape.mt * shape.c * 256
                )  # of a cluster's CTAs, in the place of the rings; of slices, in their own
                assert (
                    sums <= rings < size - (shape.slices - 1) * sums
                    and (size + 1024) * shape.ctas <= 228 * 1024
                ), shape


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_library_takes_every_candidate(form: shapes.Format) -> None:
    names = ("mt", "c", "slices", "ctas", "split", "grid", "raster", "even", "lag")
    for m in (1, 33, 64, 100, 128, 256, 1000, 4096):
        for n, k in ((64, 128), (7168, 2048), (4096, 4096), (200, 640), (24576, 1536)):
            for _, config in shapes.ranked(form, m, n, k, 132):
                assert _call(form.name, m=m, n=n, k=k, ldx=k, **{name: config[name] for name in names}) > 0, (
                    m,
                    n,
                    k,
                    config,
                )


@needs_library
def test_the_library_takes_what_is_shipped() -> None:
    from gristmill.kernel_registry.store import shipped_times

    shipped = [t for t in shipped_times() if t.kernel == spec.KERNEL.name]
    assert len(shipped) > 50
    for timing in shipped:
        given = {
            name: int(value) for name, value in timing.config.items() if name not in ("format", "tile_bytes")
        }
        problem = OP.problem(timing.problem)
        m, n, k = (problem.integer(axis) for axis in "mnk")
        assert _call(str(timing.config["format"]), m=m, n=n, k=k, ldx=k, **given) > 0, timing


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"mt": 48}, -5),
        ({"c": 3}, -5),
        ({"slices": 2}, -5),
        ({"ctas": 1}, -5),
        ({"split": 3}, -5),
        ({"mt": 32, "split": 8}, -5),
        ({"grid": 0}, -5),
        ({"grid": 5000}, -5),
        ({"raster": 0}, -5),
        ({"lag": 1}, -5),  # two CTAs on a multiprocessor need not take turns
        ({"mt": 128, "c": 4, "ctas": 1, "lag": -1}, -5),
        (
            {"mt": 128, "c": 4, "ctas": 1, "lag": 4},
            -5,
        ),  # x has 7 slots: the first half would wait for one that the second has
        ({"mt": 128, "c": 4, "ctas": 1, "lag": 2, "split": 2}, -5),
        ({"mt": 128, "c": 1, "slices": 2, "ctas": 1, "even": 1}, -5),
        ({"even": 3}, -5),
        ({"even": -1}, -5),
        ({"mt": 128, "c": 1, "slices": 2, "ctas": 1, "k": 128}, -5),  # one group for two slices
        ({"mt": 128, "c": 1, "slices": 2, "ctas": 1, "split": 2}, -5),
        ({"m": -1}, -2),
        ({"k": 0}, -2),
        ({"n": 0}, -2),
        ({"ldx": 250}, -2),
        ({"ldx": 260}, -2),
        ({"dtype": 0}, -1),
        ({"scales": 3}, -1),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert _call(**changed) == code


def _best(m: int, n: int, k: int) -> dict[str, int]:
    form = format_of(QuantScheme.parse("int4_g128"))
    return shapes.ranked(form, m, n, k, 132)[0][1]


@pytest.mark.parametrize(
    ("m", "n", "k", "even"), [(1024, 5120, 27648, 2), (1024, 7168, 16384, 2), (32, 5120, 27648, 1)]
)
def test_ctas_keep_together_along_k_where_l2_does_not_hold_x_and_w(m: int, n: int, k: int, even: int) -> None:
    """160 and 224 tiles: were they all dealt out, no two CTAs would be at the same k. 40 tiles leave no choice."""
    assert _best(m, n, k)["even"] == even


def test_neighbours_share_x_where_w_stays_in_l2() -> None:
    assert _best(256, 7168, 2048)["raster"] == 1
    assert _best(256, 28672, 4096)["raster"] > 1
    assert _best(20000, 4096, 1536)["raster"] == shapes.BAND
