"""linear_w8a8_sm80 without a GPU: accepted problems, configurations that fit, the library's own arithmetic, refusals of the launcher, and the
machine code of its PTX. tests/native/test_w8a8_fibers.py executes its source."""

from __future__ import annotations

import re

import pytest
import torch

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, MOST_SHARED
from gristmill.kernels.linear.w8a8_sm80 import _launch, shapes
from gristmill.kernels.linear.w8a8_sm80.args import ARGS, QUANTIZE
from gristmill.kernels.linear.w8a8_sm80.shapes import SHAPES
from gristmill.quant import pack, quantize
from tests.calls import make_call
from tests.kernels.machine_code import PTX_LIBRARY, assembled, entries, needs_assembler

OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w8a8_sm80")
BUILD = Build.of({"torch": "2.13.0"}, cuda_archs=("compute_80", "sm_90a"))
GM_OK, GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = 0, -1, -2, -5
POINTER = 64
needs_library = pytest.mark.skipif(
    not PTX_LIBRARY.is_file(), reason="the CUDA library is not built: needs nvcc"
)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=0,n=1,k=16,w=int8_ch.int8_token", None),
        ("m=257,n=64,k=65536,x=fp16,w=int8_ch.int8_token,epilogue=bias+residual+silu_mul", None),
        ("m=7,n=63,k=272,w=int8_ch.int8_token,codes=true", None),
        ("m=1,n=64,k=65552,w=int8_ch.int8_token", "at most 65536"),
        ("m=1,n=64,k=264,w=int8_ch.int8_token", "K a multiple of 16"),
        ("m=1,n=64,k=256,x=fp32,w=int8_ch.int8_token", "fp16 or bf16"),
        ("m=1,n=64,k=256,w=int8_ch", "not int8_ch"),
        ("m=1,n=64,k=256,w=int8_g128.int8_g128", "not int8_g128.int8_g128"),
        ("m=1,n=64,k=256,w=fp8_ch.fp8_token", "not fp8_ch.fp8_token"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_every_gpu_from_sm_80_on(name: str) -> None:
    assert not KERNEL.requires.check_hardware(Target.parse(name))
    assert not KERNEL.requires.check_build(Target.parse(name), BUILD)


@pytest.mark.parametrize("name", ["sm_70", "sm_75", "gfx942", "cpu:avx2"])
def test_no_other_device(name: str) -> None:
    assert KERNEL.requires.check_hardware(Target.parse(name))


@pytest.mark.parametrize("m", [0, 1, 7, 16, 17, 64, 65, 257, 4096])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 16), (7, 272), (4096, 4096), (4096, 14336), (14336, 4096), (151936, 4096)]
)
def test_the_default_is_the_first_to_try_and_every_cta_has_a_part(m: int, n: int, k: int) -> None:
    problem, target = OP.problem(f"m={m},n={n},k={k},w=int8_ch.int8_token"), Target.parse("sm_86")
    configs = list(KERNEL.space(problem, target))  # type: ignore[misc]
    assert configs[0] == KERNEL.config(problem, target) and len({str(one) for one in configs}) == len(configs)
    for config in configs:
        (shape,) = (one for one in SHAPES if one[:2] == (config["mt"], config["warps"]))
        grid, share = int(config["grid"]), int(config["share"])
        tiles, slots = -(-max(m, 1) // shape.mt) * -(-n // shape.rows), -(-k // shape.columns)
        room = KERNEL.workspace(problem, config)
        assert room.zeroed and room.bytes >= COUNTER_BYTES + shapes.sums_bytes(config) + m * (k + 4)
        if share:
            assert grid * 4 <= COUNTER_BYTES and tiles % grid * slots >= grid, "a CTA without a part"
        else:
            assert grid <= tiles and shapes.sums_bytes(config) == 0


def test_few_tiles_are_shared_and_many_rows_take_the_largest_tile() -> None:
    target = Target.parse("sm_80")
    narrow = KERNEL.config(OP.problem("m=8,n=512,k=16384,w=int8_ch.int8_token"), target)
    assert (narrow["mt"], narrow["share"]) == (16, 1)
    large = KERNEL.config(OP.problem("m=4096,n=4096,k=4096,w=int8_ch.int8_token"), target)
    assert (large["mt"], large["warps"]) == (128, 8)


def test_parts_of_a_workspace_do_not_overlap_and_are_aligned() -> None:
    config = {"mt": 16, "warps": 4, "grid": 7, "share": 1}
    sums = 2 * 7 * 16 * 4 * 32 * 4
    assert shapes.room_of(config, 7, 272, 66, given=False) == (
        COUNTER_BYTES,
        COUNTER_BYTES + sums,
        COUNTER_BYTES + sums + 7 * 272,
        COUNTER_BYTES + sums + 7 * 272 + 32,
        COUNTER_BYTES + sums + 7 * 272 + 32 + 2 * 7 * 66,
    )
    given = shapes.room_of(config | {"share": 0}, 7, 272, 0, given=True)
    assert set(given) == {COUNTER_BYTES}
    for m, k in ((1, 16), (3, 48), (257, 272)):
        room = shapes.room_of(config, m, k, 2, given=False)
        assert not any(start % 16 for start in room[:-1]) and list(room) == sorted(room)


def ask(**changed: int) -> int:
    """The library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    good = {
        "device": -1,
        "m": 64,
        "n": 64,
        "k": 256,
        "ldx": 256,
        "y_type": 2,
        "mt": 16,
        "warps": 4,
        "grid": 1,
    }
    return ptx_entry("gm_w8a8_linear_sm80", ARGS)(ARGS.new(**(good | changed)))


@needs_library
def test_the_library_has_every_shape_and_counts_the_same_shared_memory() -> None:
    for shape in SHAPES:
        size = ask(mt=shape.mt, warps=shape.warps)
        # 1 KiB is the system's, and 128 bytes are static.
        assert size == shape.shared_bytes <= MOST_SHARED - 1024 - 128


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"warps": 5}, GM_E_ARG),
        ({"mt": 48}, GM_E_ARG),
        ({"grid": 0}, GM_E_ARG),
        ({"m": -1}, GM_E_SHAPE),
        ({"n": 0}, GM_E_SHAPE),
        ({"k": 0}, GM_E_SHAPE),
        ({"k": 264}, GM_E_SHAPE),
        ({"k": 65552}, GM_E_SHAPE),
        ({"m": 1 << 30, "n": 1 << 20}, GM_E_SHAPE),
        ({"y_type": 0}, GM_E_DTYPE),
        ({"w_type": 3}, GM_E_DTYPE),
        ({"device": 0, "m": 0}, GM_OK),
        ({"device": 0, "ldx": 240}, GM_E_ARG),
        ({"device": 0, "ldx": 264}, GM_E_ARG),
        ({"device": 0, "x": 8}, GM_E_ARG),
        ({"device": 0, "w": 8}, GM_E_ARG),
        (
            {"device": 0, "n": 512, "k": 1024, "ldx": 1024, "grid": 3, "share": 1},
            GM_E_ARG,
        ),  # without counters
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert ask(**changed) == code


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"x_type": 0}, GM_E_DTYPE),
        ({"k": 24}, GM_E_SHAPE),
        ({"ldx": 260}, GM_E_SHAPE),
        ({"x": 8}, GM_E_SHAPE),
        ({"m": 0}, GM_OK),
    ],
)
def test_the_quantizer_refuses(changed: dict[str, int], code: int) -> None:
    good = {"device": 0, "m": 1, "k": 256, "ldx": 256, "x_type": 2, "x": POINTER}
    assert ptx_entry("gm_quantize_int8_sm80", QUANTIZE)(QUANTIZE.new(**(good | changed))) == code


def test_the_launcher_refuses_other_weights() -> None:
    x, out = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 32, dtype=torch.bfloat16)
    config = KERNEL.config(OP.problem("m=2,n=32,k=64,w=int8_ch.int8_token"), Target.parse("sm_80"))
    codes, scales, *others = pack(quantize(torch.randn(32, 64), "int8_ch"), "plain_v1").tensors

    def run(rows: int, *tensors: torch.Tensor) -> None:
        _launch.launch(
            config, make_call("linear", x[:rows], [*tensors], None, None, False, 32, None, out[:rows])
        )

    with pytest.raises(ValueError, match=r"expected codes \[32, 64\]"):
        run(2, codes[1:], scales, *others)
    with pytest.raises(ValueError, match="a permutation"):
        run(2, codes, scales, *others[:-1], torch.arange(64, dtype=torch.int32))
    with pytest.raises(ValueError, match="one scale for each of 32 rows"):
        run(2, codes, scales.repeat(1, 2), *others)
    run(0, codes, scales, *others)  # no rows: nothing to do, and no device asked


@pytest.mark.parametrize(
    ("m", "offset", "step"), [(1, 0, 64), (3, 0, 64), (3, 0, 72), (3, 1, 64), (1, 1, 65)]
)
def test_given_codes_are_copied_where_their_rows_are_not_aligned(m: int, offset: int, step: int) -> None:
    memory = torch.arange(4 * 80, dtype=torch.int32).to(torch.int8)
    start = -memory.data_ptr() % 16 + offset
    codes = memory.as_strided((m, 64), (step, 1), start)
    found = _launch._aligned(codes, m, 64)
    assert torch.equal(found, codes) and found.data_ptr() % 16 == 0 and found.stride(0) % 16 == 0
    assert (found.data_ptr() == codes.data_ptr()) is (offset == 0 and step == 64)


@needs_assembler
@pytest.mark.parametrize(
    ("arch", "step"),
    [
        ("sm_80", 4),
        *(
            pytest.param(arch, 1, marks=pytest.mark.slow)
            for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
        ),
    ],
)
def test_machine_code(arch: str, step: int) -> None:
    kernels = entries("_linear_w8a8_sm80")
    assert len(kernels) == len(SHAPES)
    used, code = assembled("_linear_w8a8_sm80", arch, kernels[::step])
    for kernel, (registers, stack) in used.items():
        mt, warps = map(int, kernel.rpartition("_")[2].split("x"))
        (shape,) = (one for one in SHAPES if one[:2] == (mt, warps))
        text = code[kernel]
        assert stack == 0 and "STL" not in text and "LDL" not in text, f"{kernel} spills"
        assert registers * warps * 32 * shape.ctas <= 65536, f"{kernel}: {registers} registers"
        # A slot, once: two tiles of W and each 8 rows of x for each 32 columns.
        steps = shape.columns // 32
        assert len(re.findall(r"IMMA\.16832\.S8\.S8", text)) == steps * 2 * mt // 8, kernel
        assert len(re.findall(r"LDSM\.16\.M88\.4", text)) == steps * (2 + mt // 16), kernel
        assert "LDGSTS.E.BYPASS.128" in text, kernel


@needs_assembler
def test_machine_code_of_the_quantizer() -> None:
    kernels = entries("_quantize_int8_sm80")
    used, code = assembled("_quantize_int8_sm80", "sm_80", kernels)
    assert sorted(used) == ["quantize_int8_bf16", "quantize_int8_fp16"]
    for kernel, (registers, stack) in used.items():
        assert stack == 0 and registers * 256 * 4 <= 65536, (kernel, registers, stack)
        assert re.search(r"LDG\.E\.128|LD\.E\.128", code[kernel]) and "STL" not in code[kernel], kernel
