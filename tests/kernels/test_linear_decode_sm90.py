"""The decode kernels over frag16 tiles without a GPU: accepted problems, configurations that fit, the
library's own arithmetic."""

from __future__ import annotations

from types import ModuleType

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm90 import decode, decode_ws
from gristmill.kernels.linear.frag16_sm90.args import ARGS
from gristmill.kernels.linear.frag16_sm90.instances import Format, formats, limits
from gristmill.kernels.native import cuda_entry, library_dir
from tests.kernels.built_formats import built

OP = default_registry().op("linear")
TARGET = Target.parse("sm_90")
BUILT = (library_dir() / "libgristmill_cuda_sm90a.so").is_file()
SCHEMES = tuple(
    scheme for name in ("w4", "f4", "w8") for scheme in default_registry().layout(f"{name}_frag16_v1").schemes
)
DECODE, WIDE_DECODE, DECODE_WS, WIDE_DECODE_WS = (
    default_registry().kernel("linear", f"linear_w{bits}a16_{name}_sm90")
    for name in ("decode", "decode_ws")
    for bits in (4, 8)
)
needs_library = pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")


def format_of(scheme: str) -> Format:
    parsed = decode.SCHEDULE.format_of(QuantScheme.parse(scheme))
    assert parsed is not None and parsed is decode_ws.SCHEDULE.format_of(QuantScheme.parse(scheme))
    return parsed


def ask(form: str, schedule: str, **fields: int) -> int:
    """Returns the library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    args = ARGS.new(**({"device": -1, "pdl": 1, "scale_type": 2} | fields))
    return cuda_entry(f"gm_linear_{form}_{schedule}_sm90", ARGS)(args)


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
    for kernel in (DECODE, DECODE_WS):
        refusal = kernel.accepts(OP.problem(problem))
        assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_eight_bits() -> None:
    for kernel in (WIDE_DECODE, WIDE_DECODE_WS):
        for scheme in ("int8_ch", "int8_g128", "fp8", "fp8_ch", "fp8_block"):
            assert kernel.accepts(OP.problem(f"m=3,n=33,k=384,w={scheme}")) is None
        assert "mxfp8" in (kernel.accepts(OP.problem("m=1,n=64,k=256,w=mxfp8")) or "")
        assert "8 bits" in (kernel.accepts(OP.problem("m=1,n=64,k=256,w=nvfp4")) or "")


def test_every_scheme_that_is_accepted_has_a_layout_and_the_bytes_agree() -> None:
    from gristmill.quant.layouts.w4_frag16_v1 import tile_bytes

    for kernel in (DECODE, WIDE_DECODE, DECODE_WS, WIDE_DECODE_WS):
        layouts = [default_registry().layout(name) for name in kernel.layouts]
        for scheme in SCHEMES:
            accepted = kernel.accepts(OP.problem(f"m=1,n=64,k=256,w={scheme}")) is None
            assert accepted == any(layout.accepts(scheme) for layout in layouts), (kernel.name, scheme)
            assert format_of(scheme).tile_bytes == tile_bytes(QuantScheme.parse(scheme))
            assert default_registry().layout(format_of(scheme).layout).accepts(scheme)


def test_hardware_is_hopper_alone() -> None:
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert DECODE.requires.check_hardware(Target.parse(name)), name
        assert DECODE_WS.requires.check_hardware(Target.parse(name)), name
    assert not DECODE.requires.check_hardware(TARGET)
    assert not DECODE_WS.requires.check_hardware(TARGET)


@pytest.mark.parametrize("m", [0, 1, 8, 9, 16])
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 128), (16, 256), (2112, 7168), (4096, 14336), (5120, 27648), (151936, 4096), (7168, 65536)],
)
@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "nvfp4", "fp8"])
def test_the_default_fits_and_is_among_those_to_try(scheme: str, m: int, n: int, k: int) -> None:
    problem, form = OP.problem(f"m={m},n={n},k={k},w={scheme}"), format_of(scheme)
    for kernel in (DECODE, DECODE_WS):
        config = kernel.config(problem, TARGET)
        assert config == next(iter(kernel.space(problem, TARGET)))
        if kernel is DECODE_WS:
            one = next(
                s
                for s in decode_ws.shapes_of(form)
                if all(config[name] == value for name, value in s._asdict().items())
            )
            assert one.nt * 8 >= m and config["depth"] % one.wk == 0
            size = decode_ws.shared_bytes(one, form.tile_bytes, int(config["split"]), int(config["depth"]))
        else:
            shape = next(
                s
                for s in decode.shapes_of(form)
                if (s.nt, s.rt, s.wk) == tuple(config[name] for name in ("nt", "rt", "wk"))
            )
            assert shape.nt * 8 >= m
            size = decode.shared_bytes(
                shape, form.tile_bytes, max(m, 1), k, int(config["split"]), int(config["depth"])
            )
        assert size < limits()["cta_bytes"]
        estimate = kernel.estimate(problem, TARGET)
        assert estimate is not None and 0 < estimate < 1e4


@pytest.mark.parametrize("schedule", [decode, decode_ws])
def test_an_instance_is_found_by_its_key(schedule: ModuleType) -> None:
    for form in formats().values():
        shapes = schedule.shapes_of(form)
        keys = {tuple(getattr(shape, name) for name in schedule.SCHEDULE.key) for shape in shapes}
        assert len(keys) == len(shapes) >= 5


@needs_library
@pytest.mark.parametrize("name", [form.name for form in built("decode", "decode_ws")])
def test_the_library_counts_the_same_shared_memory(name: str) -> None:
    form = formats()[name]
    for x_type in (2, 1):
        for m, n, k in ((1, 4096, 4096), (9, 100, 1536), (16, 7168, 16384)):
            problem = {"m": m, "n": n, "k": k, "ldx": k, "x_type": x_type}
            for schedule in (decode, decode_ws):
                for shape, split, depth, size in schedule.candidates(form, m, n, k):
                    config = schedule.config_of(shape, split, depth)
                    assert ask(name, schedule.SCHEDULE.name, **problem, **config) == size, (
                        shape,
                        split,
                        depth,
                    )


REFUSED = [
    ({"m": 9}, -2),
    ({"k": 0}, -2),
    ({"n": 0}, -2),
    ({"x_type": 0}, -1),
    ({"scale_type": 3}, -1),
    ({"rt": 5}, -5),
    ({"split": 3}, -5),
    ({"depth": 0}, -5),
]


@needs_library
@pytest.mark.parametrize(("changed", "code"), REFUSED)
def test_decode_refuses(changed: dict[str, int], code: int) -> None:
    valid = {
        "m": 1,
        "n": 64,
        "k": 256,
        "ldx": 256,
        "x_type": 2,
        "nt": 1,
        "rt": 2,
        "wk": 8,
        "split": 1,
        "depth": 1,
    }
    assert ask("int4_g128", "decode", **valid) > 0
    assert ask("int4_g128", "decode", **(valid | changed)) == code


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        *REFUSED,
        ({"depth": 6}, -5),
        ({"depth": 20}, -5),
        ({"x": 8}, -2),
        ({"ldx": 252}, -2),
        ({"ldx": 248}, -2),
    ],
)
def test_decode_ws_refuses(changed: dict[str, int], code: int) -> None:
    """Depths that are no multiple of the slices along K are refused: a slice that shares a slot with another
    would read it one pass too early."""
    valid = {
        "m": 1,
        "n": 64,
        "k": 256,
        "ldx": 256,
        "x_type": 2,
        "nt": 1,
        "rt": 7,
        "wn": 2,
        "wk": 4,
        "split": 1,
    }
    valid["depth"] = 4
    assert ask("int4_g128", "decode_ws", **valid) > 0
    assert ask("int4_g128", "decode_ws", **(valid | changed)) == code
