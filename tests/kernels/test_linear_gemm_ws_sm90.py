"""gemm_ws over frag16 tiles without a GPU: accepted problems, configurations that fit, the library's own
arithmetic."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm90 import gemm_ws
from gristmill.kernels.linear.frag16_sm90.args import ARGS
from gristmill.kernels.linear.frag16_sm90.instances import Format, formats
from gristmill.kernels.native import cuda_entry, library_dir
from tests.kernels.built_formats import built

OP = default_registry().op("linear")
TARGET = Target.parse("sm_90")
KERNEL, WIDE = (default_registry().kernel("linear", f"linear_w{bits}a16_gemm_ws_sm90") for bits in (4, 8))
SCHEMES = tuple(
    scheme for name in ("w4", "f4", "w8") for scheme in default_registry().layout(f"{name}_frag16_v1").schemes
)
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
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_every_scheme_that_is_accepted_has_a_layout() -> None:
    for kernel in (KERNEL, WIDE):
        layouts = [default_registry().layout(name) for name in kernel.layouts]
        for scheme in SCHEMES:
            accepted = kernel.accepts(OP.problem(f"m=64,n=64,k=256,w={scheme}")) is None
            assert accepted == any(layout.accepts(scheme) for layout in layouts), (kernel.name, scheme)


def test_hardware_is_hopper_alone() -> None:
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert KERNEL.requires.check_hardware(Target.parse(name)), name
    assert not KERNEL.requires.check_hardware(TARGET)


@pytest.mark.parametrize("m", [0, 1, 17, 64, 65, 128, 160, 224, 257, 1000, 4096, 20000])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 128), (16, 256), (2112, 7168), (4096, 14336), (5120, 27648), (151936, 4096)]
)
@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4", "int4_g32_zp"])
def test_the_default_is_the_first_to_try_and_says_its_workspace(scheme: str, m: int, n: int, k: int) -> None:
    problem = OP.problem(f"m={m},n={n},k={k},w={scheme}")
    config = KERNEL.config(problem, TARGET)
    assert config == next(iter(KERNEL.space(problem, TARGET)))
    estimate = KERNEL.estimate(problem, TARGET)
    assert estimate is not None and 0 < estimate < 1e5
    room = KERNEL.workspace(problem, config)
    assert room.bytes == gemm_ws.workspace_bytes(config) and room.zeroed == bool(config["even"])
    assert room.bytes < 1 << 25


def test_an_instance_is_found_by_its_key() -> None:
    for form in formats().values():
        shapes = gemm_ws.shapes_of(form)
        keys = {tuple(getattr(shape, name) for name in gemm_ws.SCHEDULE.key) for shape in shapes}
        assert len(keys) == len(shapes) >= 4


def _call(form: str = "int4_g128", **changed: int) -> int:
    """Returns the library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    valid = {
        "m": 64,
        "n": 64,
        "k": 256,
        "ldx": 256,
        "x_type": 2,
        "scale_type": 2,
        "pdl": 1,
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
    }
    return cuda_entry(f"gm_linear_{form}_gemm_ws_sm90", ARGS)(ARGS.new(**(valid | changed)))


@needs_library
@pytest.mark.parametrize("form", built("gemm_ws"), ids=lambda form: form.name)
def test_every_instance_fits_a_multiprocessor(form: Format) -> None:
    for dtype in (1, 2):
        for shape in gemm_ws.shapes_of(form):
            for scales in (1, 2):
                key = dict(zip(("mt", "c", "slices", "ctas"), shape[:4], strict=True))
                size = _call(form.name, k=2048, ldx=2048, x_type=dtype, scale_type=scales, **key)
                of_x, of_w = gemm_ws.slots_of(form, shape)
                rings = of_x * shape.mt * 128 + of_w * shape.c * 4 * form.tile_bytes
                # Partial sums of the CTAs of a cluster reuse the rings; those of slices have their own memory, up to 128 rows of x.
                sums = shape.mt * shape.c * 256
                own = (shape.slices - 1) * sums if shape.mt <= 128 else 0
                assert sums <= rings < size - own and (size + 1024) * shape.ctas <= 228 * 1024, shape


@needs_library
@pytest.mark.parametrize("form", built("gemm_ws"), ids=lambda form: form.name)
def test_the_library_takes_every_candidate(form: Format) -> None:
    for m in (1, 33, 64, 100, 128, 256, 1000, 4096):
        for n, k in ((64, 128), (7168, 2048), (4096, 4096), (200, 640), (24576, 1536)):
            for _, config in gemm_ws.ranked(form, m, n, k, 132):
                assert _call(form.name, m=m, n=n, k=k, ldx=k, **config) > 0, (
                    m,
                    n,
                    k,
                    config,
                )


@needs_library
def test_the_library_takes_what_is_shipped() -> None:
    from gristmill.kernel_registry.store import shipped_times

    names = {form.name for form in built("gemm_ws")}
    shipped = [t for t in shipped_times() if t.kernel == KERNEL.name and t.config["format"] in names]
    assert len(shipped) > 50
    for timing in shipped:
        launch = {
            name: int(value) for name, value in timing.config.items() if name not in ("format", "tile_bytes")
        }
        problem = OP.problem(timing.problem)
        m, n, k = (problem.integer(axis) for axis in "mnk")
        assert _call(str(timing.config["format"]), m=m, n=n, k=k, ldx=k, **launch) > 0, timing


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
        ({"lag": 1}, -5),  # two CTAs per SM need not take turns
        ({"mt": 128, "c": 4, "ctas": 1, "lag": -1}, -5),
        (
            {"mt": 128, "c": 4, "ctas": 1, "lag": 4},
            -5,
        ),  # x has 7 slots: the first half would wait for one that the second half holds
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
        ({"x_type": 0}, -1),
        ({"scale_type": 3}, -1),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert _call(**changed) == code


@needs_library
def test_gate_and_up_are_of_blocks_of_32_rows() -> None:
    assert _call(n=64, gated=1) > 0 and _call(n=192, gated=1) > 0
    for n in (32, 96, 130):
        assert _call(n=n, gated=1) == -2 and _call(n=n) > 0 and not gemm_ws.gates(n)


@pytest.mark.parametrize("n", [28672, 28640])
def test_estimates_know_a_launch_for_gate_and_up(n: int) -> None:
    """The kernel has it in its epilogue where it can; for the others it is a launch more."""
    decode = default_registry().kernel("linear", "linear_w4a16_decode_ws_sm90")
    for kernel, m, more in ((KERNEL, 256, not gemm_ws.gates(n)), (decode, 16, True)):
        plain, gated = (
            OP.problem(f"m={m},n={n},k=4096,w=int4_g128,epilogue={epilogue}")
            for epilogue in ("none", "silu_mul")
        )
        config = kernel.config(plain, TARGET)
        times = [kernel.estimate(problem, TARGET) for problem in (plain, gated)]
        assert times[0] is not None and times[1] is not None
        assert (times[1] - times[0] > 1.9) == more and times[1] >= times[0]
        if kernel.estimate_config is not None:
            of_config = [kernel.estimate_config(problem, config, TARGET) for problem in (plain, gated)]
            assert of_config == times


def _best(m: int, n: int, k: int) -> dict[str, int]:
    form = formats()["int4_g128"]
    return gemm_ws.ranked(form, m, n, k, 132)[0][1]


@pytest.mark.parametrize(
    ("m", "n", "k", "even"), [(1024, 5120, 27648, 2), (1024, 7168, 16384, 2), (32, 5120, 27648, 1)]
)
def test_ctas_keep_together_along_k_where_l2_does_not_hold_x_and_w(m: int, n: int, k: int, even: int) -> None:
    """160 and 224 tiles: if stream-K dealt out all of them, no two CTAs would be at the same k. With 40 tiles
    there is no choice."""
    assert _best(m, n, k)["even"] == even


def test_neighbours_share_x_where_w_stays_in_l2() -> None:
    assert _best(256, 7168, 2048)["raster"] == 1
    assert _best(256, 28672, 4096)["raster"] > 1
    assert _best(20000, 4096, 1536)["raster"] == gemm_ws.BAND
