"""linear_fp4_sm120 and linear_mxfp8_sm120 without a GPU: accepted problems, configurations that fit, the library's own arithmetic, refusals of the
launcher, machine code, grades. tests/native/test_block_scaled_fibers.py executes their sources."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry import grades
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.block_scaled_sm120 import _launch, shapes
from gristmill.kernels.linear.block_scaled_sm120.args import ARGS, QUANTIZE
from gristmill.kernels.linear.block_scaled_sm120.shapes import SHAPES
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, MOST_SHARED
from gristmill.quant import pack, quantize
from tests.calls import make_call
from tests.kernels.machine_code import TOOLS, by_kernel, compiled, library_of, listing, usage
from tests.quant.oracle import round_trip
from tests.quant.test_activations import expected, tokens

OP = default_registry().op("linear")
KERNELS = {
    "nvfp4": default_registry().kernel("linear", "linear_fp4_sm120"),
    "mxfp4": default_registry().kernel("linear", "linear_fp4_sm120"),
    "mxfp8": default_registry().kernel("linear", "linear_mxfp8_sm120"),
}
BUILD = Build.of({"torch": "2.13.0"}, cuda_archs=("compute_120f", "compute_80", "sm_90a"))
GM_OK, GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = 0, -1, -2, -5
SOURCES = Path(shapes.__file__).parent
POINTER = 64
needs_library = pytest.mark.skipif(
    not library_of("120f").is_file(), reason="not in this build: needs nvcc and GRISTMILL_RARE=on"
)
needs_tools = pytest.mark.skipif(
    shutil.which("nvcc") is None or TOOLS is None,
    reason="needs nvcc, and triton's cuobjdump and nvdisasm",
)


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        ("nvfp4", "m=0,n=1,k=128,w=nvfp4.nvfp4", None),
        ("mxfp4", "m=257,n=64,k=65536,x=fp16,w=mxfp4.mxfp4,epilogue=bias+residual+silu_mul", None),
        ("mxfp8", "m=7,n=63,k=384,w=mxfp8.mxfp8", None),
        ("nvfp4", "m=1,n=64,k=192,w=nvfp4.nvfp4", "K a multiple of 128"),
        ("mxfp8", "m=1,n=64,k=256,x=fp32,w=mxfp8.mxfp8", "fp16 or bf16"),
        ("mxfp4", "m=1,n=64,k=256,w=mxfp4.mxfp4,act_order=true", "not act-order"),
        ("nvfp4", "m=1,n=64,k=256,w=nvfp4", "not nvfp4"),
        ("nvfp4", "m=1,n=64,k=256,w=mxfp8.mxfp8", "not mxfp8.mxfp8"),
        ("mxfp8", "m=1,n=64,k=256,w=mxfp4.mxfp8", "not mxfp4.mxfp8"),
        ("mxfp8", "m=1,n=64,k=256,w=fp8_ch.fp8_token", "not fp8_ch.fp8_token"),
    ],
)
def test_accepts(kernel: str, problem: str, reason: str | None) -> None:
    refusal = KERNELS[kernel].accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_where_it_runs(format: str) -> None:
    requires = KERNELS[format].requires
    for name in ("sm_120", "sm_121"):
        assert not requires.check_hardware(Target.parse(name))
        assert not requires.check_build(Target.parse(name), BUILD)
    for name in ("sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "gfx950", "cpu:avx2"):
        assert requires.check_hardware(Target.parse(name)), name
    without = Build.of({"torch": "2.13.0"}, cuda_archs=("compute_80",), left_out=("compute_120f",))
    assert requires.check_build(Target.parse("sm_120"), without) == (
        "not in this build: compute_120f (rare; GRISTMILL_RARE=on builds them)",
    )


@pytest.mark.parametrize("scheme", ["nvfp4.nvfp4", "mxfp4.mxfp4", "mxfp4.mxfp8", "mxfp8.mxfp8"])
def test_any_device_computes_these_schemes(scheme: str) -> None:
    """The reference by the oracles of both quantizers, and the fallback by the reference."""
    x, w = tokens(), torch.randn(40, 384, generator=torch.Generator().manual_seed(2))
    weights, _, activations = scheme.partition(".")
    exact = expected(x.numpy(), activations).astype("f8") @ round_trip(w.numpy(), weights).astype("f8").T
    quantized = replace(quantize(w, weights), scheme=QuantScheme.parse(scheme))
    y = OP.reference(x, quantized)
    assert torch.allclose(y.double(), torch.from_numpy(exact), rtol=0, atol=1e-5 * float(abs(exact).max()))
    fallback, target = default_registry().kernel("linear", "linear_dequant_torch"), Target.parse("cpu:avx2")
    for text in ("m=5,n=40,k=384", "m=33,n=66,k=96,x=fp16,epilogue=bias+residual+silu_mul"):
        problem = OP.problem(f"{text},w={scheme}")
        outcome = verify(OP, fallback, fallback.config(problem, target), problem, "cpu")
        assert outcome.ok, outcome.reason


@pytest.mark.parametrize("target", ["sm_120", "sm_121"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_its_source_is_executed_on_a_cpu_and_compiled_for_the_target(format: str, target: str) -> None:
    """No GPU here runs it, and the grade says so."""
    proof, *others = grades.proofs(KERNELS[format], Target.parse(target))
    assert (proof.grade, proof.record) == ("interpreted", "tests/native/test_block_scaled_fibers.py")
    assert [other.grade for other in others] == ["compiled"] and not proof.spills


@pytest.mark.parametrize("m", [0, 1, 7, 16, 17, 64, 65, 257, 4096])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (7, 384), (4096, 4096), (14336, 4096), (151936, 4096)])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_the_default_is_the_first_to_try_and_every_cta_has_a_part(
    format: str, m: int, n: int, k: int
) -> None:
    kernel, scheme = KERNELS[format], QuantScheme.parse(format)
    problem, target = OP.problem(f"m={m},n={n},k={k},w={format}.{format}"), Target.parse("sm_120")
    configs = list(kernel.space(problem, target))  # type: ignore[misc]
    assert configs[0] == kernel.config(problem, target) and len({str(one) for one in configs}) == len(configs)
    for config in configs:
        (shape,) = (one for one in SHAPES[format] if one[:2] == (config["mt"], config["warps"]))
        grid, share = int(config["grid"]), int(config["share"])
        tiles, slots = -(-max(m, 1) // shape.mt) * -(-n // shape.rows), k // 128
        room = kernel.workspace(problem, config)
        least = COUNTER_BYTES + shapes.sums_bytes(config) + m * (scheme.code_bytes(k) + scheme.groups(k))
        assert room.zeroed and room.bytes >= least
        if share:
            assert grid * 4 <= COUNTER_BYTES and tiles % grid * slots >= grid, "a CTA without a part"
        else:
            assert grid <= tiles and shapes.sums_bytes(config) == 0


def test_few_tiles_are_shared_and_many_rows_take_the_largest_tile() -> None:
    target = Target.parse("sm_120")
    narrow = KERNELS["nvfp4"].config(OP.problem("m=8,n=512,k=16384,w=nvfp4.nvfp4"), target)
    assert (narrow["mt"], narrow["share"]) == (16, 1)
    large = KERNELS["mxfp8"].config(OP.problem("m=4096,n=4096,k=4096,w=mxfp8.mxfp8"), target)
    assert large["mt"] == 128


def test_parts_of_a_workspace_do_not_overlap_and_are_aligned() -> None:
    for format in SHAPES:
        for share, m, k, gated in ((1, 7, 384, 66), (0, 1, 128, 0), (0, 257, 4096, 2)):
            config: dict[str, int | str] = {"format": format, "mt": 16, "warps": 4, "grid": 7, "share": share}
            room, scheme = shapes.room_of(config, m, k, gated), QuantScheme.parse(format)
            assert list(room) == sorted(room) and not any(start % 16 for start in room)
            assert room.sums == COUNTER_BYTES
            assert room.codes - room.sums >= (2 * 7 * 16 * 128 * 4 if share else 0)
            assert room.scales - room.codes >= m * scheme.code_bytes(k)
            assert room.factor - room.scales >= m * scheme.groups(k)
            if format == "nvfp4":
                assert room.maxima - room.factor >= 4 and room.gated - room.maxima >= 4 * shapes.MOST_PARTS
            assert room.size - room.gated >= 2 * m * gated


def ask_library(format: str, **changed: int) -> int:
    """The library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    good = {"device": -1, "m": 64, "n": 64, "k": 256, "y_type": 2, "mt": 16, "warps": 4, "grid": 1}
    entry = ptx_entry(f"gm_linear_{format}_sm120f", ARGS, _launch.ARCH)
    return entry(ARGS.new(**(good | changed)))


def test_every_shape_fits_into_shared_memory() -> None:
    for format, known in SHAPES.items():
        for shape in known:
            # 1 KiB is the system's, and 128 bytes are static.
            assert shape.ctas * (shape.shared_bytes(format) + 1024 + 128) <= 100 << 10
            assert shape.shared_bytes(format) <= MOST_SHARED - 1024 - 128


@needs_library
def test_the_library_has_every_shape_and_counts_the_same_shared_memory() -> None:
    for format, known in SHAPES.items():
        for shape in known:
            assert ask_library(format, mt=shape.mt, warps=shape.warps) == shape.shared_bytes(format)


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
        ({"k": 192}, GM_E_SHAPE),
        ({"m": 1 << 30, "n": 1 << 20}, GM_E_SHAPE),
        ({"y_type": 0}, GM_E_DTYPE),
        ({"device": 0, "m": 0}, GM_OK),
        ({"device": 0, "x": 8}, GM_E_ARG),
        ({"device": 0, "w": 8}, GM_E_ARG),
        ({"device": 0, "x_scale": 4}, GM_E_ARG),
        ({"device": 0, "w_scale": 4}, GM_E_ARG),
        ({"device": 0, "n": 512, "k": 1024, "grid": 3, "share": 1}, GM_E_ARG),  # without counters
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert ask_library("nvfp4", **changed) == code


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"x_type": 0}, GM_E_DTYPE),
        ({"format": 3}, GM_E_ARG),
        ({"k": 192}, GM_E_SHAPE),
        ({"ldx": 260}, GM_E_SHAPE),
        ({"ldx": 248}, GM_E_SHAPE),
        ({"x": 8}, GM_E_SHAPE),
        ({"format": 0}, GM_E_ARG),  # without room for the factor
        ({"m": 0}, GM_OK),
    ],
)
def test_the_quantizer_refuses(changed: dict[str, int], code: int) -> None:
    good = {"device": 0, "m": 1, "k": 256, "ldx": 256, "x_type": 2, "format": 1, "x": POINTER}
    entry = ptx_entry("gm_quantize_blocks_sm120f", QUANTIZE, _launch.ARCH)
    assert entry(QUANTIZE.new(**(good | changed))) == code


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_the_launcher_refuses_other_weights(format: str) -> None:
    x, out = torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 32, dtype=torch.bfloat16)
    problem = OP.problem(f"m=2,n=32,k=128,w={format}.{format}")
    config = KERNELS[format].config(problem, Target.parse("sm_120"))
    slots = [*pack(quantize(torch.randn(32, 128), format), "plain_v1").tensors]

    def run(rows: int, **changed: torch.Tensor) -> None:
        names = ("codes", "scales", "zeros", "row_scale", "row_block", "perm")
        weight = [changed.get(name, slot) for name, slot in zip(names, slots, strict=True)]
        call = make_call("linear", x[:rows], weight, None, None, False, 32, None, out[:rows])
        _launch.launch(config, call)

    with pytest.raises(ValueError, match=r"expected codes \[32, "):
        run(2, codes=slots[0][1:])
    with pytest.raises(ValueError, match=r"and scales \[32, "):
        run(2, scales=slots[1][:, :-1])
    with pytest.raises(ValueError, match="a permutation"):
        run(2, perm=torch.arange(128, dtype=torch.int32))
    with pytest.raises(ValueError, match="multipliers of rows"):
        run(2, row_scale=torch.ones(3))
    run(0)  # no rows: nothing to do, and no device asked


def cubin_of(stem: str, *flags: str, folder: Path = SOURCES) -> Path:
    """The cubin of a source."""
    cubin = Path(tempfile.mkdtemp()) / f"{stem}.cubin"
    folders = (SOURCES.parents[1] / "_native", SOURCES.parents[1], folder)
    return compiled(folder / f"{stem}.cu", cubin, "-cubin", "-std=c++20", "-O3", *flags, folders=folders)


INSTRUCTIONS = {
    "nvfp4": r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X",
    "mxfp4": r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.E8 ",
    "mxfp8": r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8",
}


FORMATS_AND_TARGETS = [
    ("nvfp4", "sm_120f"),
    *(
        pytest.param(format, arch, marks=pytest.mark.slow)
        for format in INSTRUCTIONS
        for arch in ("sm_120f", "sm_120a", "sm_121a")
        if (format, arch) != ("nvfp4", "sm_120f")
    ),
]
"""Of machine code: one is fast enough for every run."""


@needs_tools
@pytest.mark.parametrize(("format", "arch"), FORMATS_AND_TARGETS)
def test_machine_code(format: str, arch: str) -> None:
    check_tiles(format, cubin_of(f"_linear_{format}_sm120f", f"-arch={arch}"), "block_scaled")


def check_tiles(format: str, cubin: Path, prefix: str) -> None:
    """The machine code of the kernels `prefix`_<rows>x<warps>: nothing spills, and a slot is multiplied, read and copied once."""
    used = {name: (registers, stack) for name, registers, stack in usage(cubin)}
    code, steps = by_kernel(listing("nvdisasm", "-c", "-ndf", of=cubin)), 2 if format != "mxfp8" else 4
    assert len(used) == len(SHAPES[format])
    for shape in SHAPES[format]:
        name = f"{prefix}_{shape.mt}x{shape.warps}"
        (registers, stack), text = used[name], code[name]
        assert stack == 0 and "STL" not in text and "LDL" not in text, f"{name} spills"
        assert registers * shape.warps * 32 * shape.ctas <= 65536, f"{name}: {registers} registers"
        # A slot, once: two tiles of W and each 8 rows of x for each step; scales of W, and of each 32 rows of x, by one load.
        assert len(re.findall(INSTRUCTIONS[format], text)) == steps * 2 * shape.mt // 8, name
        assert len(re.findall(r"LDSM\.16\.M88\.4", text)) == steps * (2 + shape.mt // 16), name
        assert "LDGSTS.E.BYPASS.128" in text and re.search(r"LDGSTS\.E(\.64)? ", text), name


@needs_tools
@pytest.mark.slow
def test_machine_code_of_the_quantizer() -> None:
    cubin = cubin_of("_quantize_blocks_sm120f", "-arch=sm_120f")
    assert len(usage(cubin)) == 10
    for name, registers, stack in usage(cubin):
        assert stack == 0 and registers * 256 * 6 <= 65536, (name, registers, stack)


@needs_tools
@pytest.mark.slow  # a minute: dequantizing is much code
@pytest.mark.parametrize(("format", "arch"), [("mxfp8", "sm_90"), ("nvfp4", "sm_89"), ("mxfp4", "sm_90")])
def test_the_same_source_compiles_with_other_instructions_for_other_gpus(format: str, arch: str) -> None:
    """What surrounds the one instruction can then be run there (tests/gpu/test_linear_block_scaled.py)."""
    cubin = cubin_of(f"_linear_{format}_sm120f", f"-arch={arch}", "-DGM_BLOCK_SCALE_BY_BF16")
    text = listing("nvdisasm", "-c", "-ndf", of=cubin)
    assert "HMMA.16816.F32.BF16" in text and "MMA.SF" not in text
