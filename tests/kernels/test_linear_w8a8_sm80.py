"""linear_w8a8_sm75, _sm80 and _sm89 without a GPU: accepted problems, configurations that fit, the libraries' own arithmetic, refusals of the
launcher, and the machine code of their PTX. tests/native/test_w8a8_fibers.py executes their sources."""

from __future__ import annotations

import re

import pytest
import torch

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, MOST_SHARED
from gristmill.kernels.linear.w8a8_sm80 import _launch, _launch_sm80, _launch_sm89, shapes
from gristmill.kernels.linear.w8a8_sm80.args import ARGS, QUANTIZE, QUANTIZE_FP8
from gristmill.kernels.linear.w8a8_sm80.shapes import FP8, FP8_BLOCK, INT8, INT8_TURING, OPERANDS, Operands
from gristmill.quant import pack, quantize
from tests.calls import make_call
from tests.kernels.machine_code import PTX_LIBRARY, assembled, entries, library_of, needs_assembler

OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w8a8_sm80")
TURING_KERNEL = default_registry().kernel("linear", "linear_w8a8_sm75")
FP8_KERNEL = default_registry().kernel("linear", "linear_w8a8_sm89")
BUILD = Build.of({"torch": "2.13.0"}, cuda_archs=("compute_75", "compute_80", "compute_89", "sm_90a"))
KINDS = pytest.mark.parametrize("operands", OPERANDS.values(), ids=OPERANDS)
GM_OK, GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = 0, -1, -2, -5
POINTER = 64
SM89_PRODUCTS = ("sm_89", "sm_120", "sm_121")
"""Where mma.sync multiplies e4m3: elsewhere its codes become fp16."""
PRODUCTS = {
    "int8_sm80": (r"IMMA\.16832\.S8\.S8", 1),
    "int8_sm75": (r"IMMA\.(8816|16816)\.S8\.S8", 4),
    "fp8_sm89": (r"QMMA\.16832\.F32\.E4M3\.E4M3", 1),
    "fp8_block_sm89": (r"QMMA\.16832\.F32\.E4M3\.E4M3", 1),
}
"""Instructions for 16 x 32 by 32 x 8."""
needs_library = pytest.mark.skipif(
    not PTX_LIBRARY.is_file(), reason="the CUDA library is not built: needs nvcc"
)


def library(arch: str) -> None:
    """Skips a test of a library that this build lacks."""
    if not library_of(arch).is_file():
        pytest.skip(f"compute_{arch} is not in this build")


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


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=0,n=1,k=16,w=fp8_ch.fp8_token", None),
        ("m=257,n=64,k=65536,x=fp16,w=fp8.fp8_token,epilogue=bias+residual+silu_mul", None),
        ("m=7,n=63,k=272,w=fp8.fp8,codes=true", None),
        ("m=7,n=63,k=272,w=fp8_ch.fp8", None),
        ("m=7,n=63,k=272,w=fp8_block.fp8_g128,codes=true", None),
        ("m=1,n=64,k=65552,w=fp8_block.fp8_g128", "at most 65536"),
        ("m=1,n=64,k=264,w=fp8_ch.fp8_token", "K a multiple of 16"),
        ("m=1,n=64,k=256,x=fp32,w=fp8_ch.fp8_token", "fp16 or bf16"),
        ("m=1,n=64,k=256,w=fp8_ch", "not fp8_ch"),
        ("m=1,n=64,k=256,w=fp8_block.fp8_token", "not fp8_block.fp8_token"),
        ("m=1,n=64,k=256,w=int8_ch.int8_token", "not int8_ch.int8_token"),
    ],
)
def test_accepts_e4m3(problem: str, reason: str | None) -> None:
    refusal = FP8_KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("name", ["sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_e4m3_on_every_gpu_from_sm_89_on(name: str) -> None:
    assert not FP8_KERNEL.requires.check_hardware(Target.parse(name))
    assert not FP8_KERNEL.requires.check_build(Target.parse(name), BUILD)


@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_86", "sm_87", "gfx950", "cpu:avx2"])
def test_no_e4m3_on_other_devices(name: str) -> None:
    assert FP8_KERNEL.requires.check_hardware(Target.parse(name))


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_every_gpu_from_sm_80_on(name: str) -> None:
    assert not KERNEL.requires.check_hardware(Target.parse(name))
    assert not KERNEL.requires.check_build(Target.parse(name), BUILD)


def test_sm_75_has_a_kernel_of_its_own() -> None:
    assert not TURING_KERNEL.requires.check_hardware(Target.parse("sm_75"))
    assert TURING_KERNEL.requires.check_hardware(Target.parse("sm_70"))
    assert TURING_KERNEL.priority < KERNEL.priority
    for text in ("m=7,n=63,k=272,w=int8_ch.int8_token,codes=true", "m=1,n=64,k=264,w=int8_ch.int8_token"):
        assert TURING_KERNEL.accepts(OP.problem(text)) == KERNEL.accepts(OP.problem(text))


@pytest.mark.parametrize("name", ["sm_70", "sm_75", "gfx942", "cpu:avx2"])
def test_no_other_device(name: str) -> None:
    assert KERNEL.requires.check_hardware(Target.parse(name))


@pytest.mark.parametrize("m", [0, 1, 7, 16, 17, 64, 65, 257, 4096])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 16), (7, 272), (4096, 4096), (4096, 14336), (14336, 4096), (151936, 4096)]
)
@KINDS
def test_the_default_is_the_first_to_try_and_every_cta_has_a_part(
    operands: Operands, m: int, n: int, k: int
) -> None:
    scheme = operands.schemes[0]
    problem, target = OP.problem(f"m={m},n={n},k={k},w={scheme}"), Target.parse("sm_89")
    kernel = {INT8: KERNEL, INT8_TURING: TURING_KERNEL}.get(operands, FP8_KERNEL)
    configs = list(kernel.space(problem, target))  # type: ignore[misc]
    assert configs[0] == kernel.config(problem, target) and len({str(one) for one in configs}) == len(configs)
    for config in configs:
        assert (config["format"], config["activation"]) == (operands.format, scheme.partition(".")[2])
        (shape,) = (one for one in operands.shapes if one[:2] == (config["mt"], config["warps"]))
        grid, share = int(config["grid"]), int(config["share"])
        tiles, slots = -(-max(m, 1) // shape.mt) * -(-n // shape.rows), -(-k // shape.columns)
        room = kernel.workspace(problem, config)
        scales = -(-k // 128) if operands.blocks else 1
        assert room.zeroed
        assert room.bytes >= COUNTER_BYTES + shapes.sums_bytes(config) + m * (k + 4 * scales)
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
    codes = COUNTER_BYTES + sums
    ends = {
        ("int8_sm80", "int8_token"): (32, 0),
        ("int8_sm75", "int8_token"): (32, 0),
        ("fp8_sm89", "fp8_token"): (32, 0),
        ("fp8_sm89", "fp8"): (32, 4 * shapes.MAXIMA),
        ("fp8_block_sm89", "fp8_g128"): (3 * 32, 0),
    }
    for (form, activation), (scales, maxima) in ends.items():
        of_kind: Config = {**config, "format": form, "activation": activation}
        end = codes + 7 * 272 + scales + maxima
        expected = (COUNTER_BYTES, codes, codes + 7 * 272, end - maxima, end, end + 2 * 7 * 66)
        assert shapes.room_of(of_kind, 7, 272, 66, given=False) == expected
        given = shapes.room_of({**of_kind, "share": 0}, 7, 272, 0, given=True)
        assert set(given) == {COUNTER_BYTES}
        for m, k in ((1, 16), (3, 48), (257, 272)):
            room = shapes.room_of(of_kind, m, k, 2, given=False)
            assert not any(start % 16 for start in room[:-1]) and list(room) == sorted(room)


def ask(operands: Operands = INT8, **changed: int) -> int:
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
        "x_pitch": 64,
        "row_block": POINTER,
    }
    library(operands.arch)
    entry = ptx_entry(f"gm_w8a8_linear_{operands.format}", ARGS, f"compute_{operands.arch}")
    return entry(ARGS.new(**(good | changed)))


@needs_library
@KINDS
def test_the_library_has_every_shape_and_counts_the_same_shared_memory(operands: Operands) -> None:
    for shape in operands.shapes:
        size = ask(operands, mt=shape.mt, warps=shape.warps)
        most = 64 << 10 if operands is INT8_TURING else MOST_SHARED
        # 1 KiB is the system's, and 128 bytes are static.
        assert size == operands.shared_bytes(shape) <= most - 1024 - 128


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
@KINDS
def test_the_library_refuses(operands: Operands, changed: dict[str, int], code: int) -> None:
    assert ask(operands, **changed) == code


@needs_library
@pytest.mark.parametrize("changed", [{"row_block": 0}, {"x_pitch": 66}, {"x_pitch": 60}, {"x_scale": 8}])
def test_the_library_refuses_scales_of_blocks(changed: dict[str, int]) -> None:
    assert ask(FP8_BLOCK, device=0, **changed) == GM_E_ARG
    assert ask(FP8, **changed) > 0


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
    entry = ptx_entry("gm_quantize_int8_sm80", QUANTIZE, "compute_80")
    assert entry(QUANTIZE.new(**(good | changed))) == code


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"x_type": 0}, GM_E_DTYPE),
        ({"format": 3}, GM_E_ARG),
        ({"format": 2, "maxima": 0}, GM_E_ARG),
        ({"format": 1, "m": 5, "pitch": 4}, GM_E_SHAPE),
        ({"k": 24}, GM_E_SHAPE),
        ({"ldx": 260}, GM_E_SHAPE),
        ({"x": 8}, GM_E_SHAPE),
        ({"m": 0}, GM_OK),
    ],
)
def test_the_quantizer_of_e4m3_refuses(changed: dict[str, int], code: int) -> None:
    good = {"device": 0, "m": 1, "k": 256, "ldx": 256, "x_type": 2, "x": POINTER, "maxima": POINTER}
    library("89")
    entry = ptx_entry("gm_quantize_fp8_sm89", QUANTIZE_FP8, "compute_89")
    assert entry(QUANTIZE_FP8.new(**(good | changed))) == code


def test_the_launcher_refuses_other_weights() -> None:
    x, out = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 32, dtype=torch.bfloat16)
    config = KERNEL.config(OP.problem("m=2,n=32,k=64,w=int8_ch.int8_token"), Target.parse("sm_80"))
    codes, scales, *others = pack(quantize(torch.randn(32, 64), "int8_ch"), "plain_v1").tensors

    def run(rows: int, *tensors: torch.Tensor) -> None:
        _launch_sm80.launch(
            config, make_call("linear", x[:rows], [*tensors], None, None, False, 32, None, out[:rows])
        )

    with pytest.raises(ValueError, match=r"expected codes \[32, 64\]"):
        run(2, codes[1:], scales, *others)
    with pytest.raises(ValueError, match="a permutation"):
        run(2, codes, scales, *others[:-1], torch.arange(64, dtype=torch.int32))
    with pytest.raises(ValueError, match="one scale for each of 32 rows"):
        run(2, codes, scales.repeat(1, 2), *others)
    run(0, codes, scales, *others)  # no rows: nothing to do, and no device asked


def test_the_launcher_refuses_other_scales_of_blocks() -> None:
    x, out = torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(2, 160, dtype=torch.bfloat16)
    config = FP8_KERNEL.config(OP.problem("m=2,n=160,k=256,w=fp8_block.fp8_g128"), Target.parse("sm_89"))
    tensors = pack(quantize(torch.randn(160, 256), "fp8_block"), "plain_v1").tensors
    codes, scales, zeros, factor, row_block, perm = tensors
    for of_blocks, rows in ((scales[:, :1], row_block), (scales, row_block[1:])):
        weight = [codes, of_blocks, zeros, factor, rows, perm]
        with pytest.raises(ValueError, match=r"expected scales \[block rows, 2\]"):
            _launch_sm89.launch(config, make_call("linear", x, weight, None, None, False, 160, None, out))


def test_given_scales_of_groups_are_copied_where_a_group_is_not_together() -> None:
    """`layers.codes` allocates [groups, rows up to a multiple of four], and passes the transpose."""
    together = torch.rand(3, 8).T[:7]
    assert _launch._pitched(together).data_ptr() == together.data_ptr()
    for other in (torch.rand(7, 3), torch.rand(3, 7).T):
        found = _launch._pitched(other)
        assert torch.equal(found, other) and found.stride() == (1, 8) and found.data_ptr() % 16 == 0


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
    ("operands", "arch", "step"),
    [
        (INT8, "sm_80", 4),
        (INT8_TURING, "sm_75", 3),
        (FP8_BLOCK, "sm_89", 3),
        *(
            pytest.param(operands, arch, 1, marks=pytest.mark.slow)
            for operands, archs in (
                (INT8_TURING, ("sm_75", "sm_86", "sm_90", "sm_120")),
                (INT8, ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")),
                (FP8, ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")),
                (FP8_BLOCK, ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")),
            )
            for arch in archs
        ),
    ],
)
def test_machine_code(operands: Operands, arch: str, step: int) -> None:
    source = {
        INT8: "_linear_w8a8_sm80",
        INT8_TURING: "_linear_w8a8_sm75",
        FP8: "_linear_fp8_sm89",
        FP8_BLOCK: "_linear_fp8_block_sm89",
    }[operands]
    kernels = entries(source)
    assert len(kernels) == len(operands.shapes)
    used, code = assembled(source, arch, kernels[::step])
    for kernel, (registers, stack) in used.items():
        mt, warps = map(int, kernel.rpartition("_")[2].split("x"))
        (shape,) = (one for one in operands.shapes if one[:2] == (mt, warps))
        text = code[kernel]
        assert stack == 0 and "STL" not in text and "LDL" not in text, f"{kernel} spills"
        assert registers * warps * 32 * shape.ctas <= 65536, f"{kernel}: {registers} registers"
        # A slot, once: two tiles of W and each 8 rows of x for each 32 columns.
        steps = shape.columns // 32
        products, parts = PRODUCTS[operands.format]
        if operands in (FP8, FP8_BLOCK) and arch not in SM89_PRODUCTS:
            products, parts = r"HMMA\.16816\.F32 ", 2
        assert len(re.findall(products, text)) == parts * steps * 2 * mt // 8, kernel
        assert len(re.findall(r"LDSM\.16\.M88\.4", text)) == steps * (2 + mt // 16), kernel
        assert ("LDGSTS.E.BYPASS.128" in text) is (operands is not INT8_TURING), kernel


@needs_assembler
@pytest.mark.parametrize(
    ("source", "arch", "formats"),
    [
        ("_quantize_int8_sm80", "sm_80", ("quantize_int8",)),
        ("_quantize_int8_sm75", "sm_75", ("quantize_int8",)),
        (
            "_quantize_fp8_sm89",
            "sm_89",
            ("largest", "quantize_fp8", "quantize_fp8_g128", "quantize_fp8_token"),
        ),
    ],
)
def test_machine_code_of_the_quantizers(source: str, arch: str, formats: tuple[str, ...]) -> None:
    kernels = entries(source)
    used, code = assembled(source, arch, kernels)
    assert sorted(used) == sorted(f"{name}_{x}" for name in formats for x in ("bf16", "fp16"))
    for kernel, (registers, stack) in used.items():
        assert stack == 0 and registers * 256 * 4 <= 65536, (kernel, registers, stack)
        assert re.search(r"LDG\.E\.128|LD\.E\.128", code[kernel]) and "STL" not in code[kernel], kernel
