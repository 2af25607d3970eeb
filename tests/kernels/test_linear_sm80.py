"""The kernels over frag16 tiles for sm_80 and newer without a GPU: accepted problems, configurations that fit, the library's own arithmetic,
and the machine code of its PTX."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm80 import _launch, decode, gemm
from gristmill.kernels.linear.frag16_sm80.args import ARGS
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format, format_of
from gristmill.quant.layouts import gguf_frag16_v1
from gristmill.quant.layouts.w4_frag16_v1 import tile_bytes
from tests.kernels.machine_code import PTX_LIBRARY, assembled, entries, needs_assembler

ROOT = Path(__file__).resolve().parents[2]
OP = default_registry().op("linear")
KERNEL, KERNEL8 = (default_registry().kernel("linear", f"linear_w{bits}a16_decode_sm80") for bits in (4, 8))
GEMM, GEMM8 = (default_registry().kernel("linear", f"linear_w{bits}a16_gemm_sm80") for bits in (4, 8))
GGUF, GEMM_GGUF = (
    default_registry().kernel("linear", f"linear_gguf_{name}_sm80") for name in ("decode", "gemm")
)
LAYOUTS = ("w4_frag16_v1", "f4_frag16_v1", "w8_frag16_v1", "gguf_frag16_v1")
BUILT = PTX_LIBRARY.is_file()
BUILD = Build.of({"torch": "2.13.0"}, cuda_archs=("compute_80", "sm_90a"))
GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = -1, -2, -5
needs_library = pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")


def form_of(scheme: str) -> Format:
    """The format that holds a scheme."""
    form = format_of(QuantScheme.parse(scheme))
    assert form is not None
    return form


def kernel_of(form: Format, schedule: str) -> Kernel:
    """The kernel that multiplies weights of a format."""
    kernels = {"decode": (KERNEL, KERNEL8, GGUF), "gemm": (GEMM, GEMM8, GEMM_GGUF)}[schedule]
    return next(kernel for kernel in kernels if form.layout in kernel.layouts)


def ask(form: str, schedule: str, **fields: int) -> int:
    """Returns the library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    given = {"device": -1, "n": 64, "k": 256, "ldx": 256, "x_type": 2, "scale_type": 2, "split": 1} | fields
    return ptx_entry(f"gm_linear_{form}_{schedule}_sm80", ARGS)(ARGS.new(**given))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=0,n=64,k=256,w=int4_g128", None),
        ("m=16,n=18,k=128,x=fp16,w=int4_g128,epilogue=bias+residual+silu_mul", None),
        ("m=1,n=64,k=256,w=int4_g64_zp,act_order=true", None),
        ("m=1,n=64,k=129,w=int4_ch", None),
        ("m=17,n=64,k=256,w=int4_g128", "M <= 16"),
        ("m=1,n=64,k=256,x=fp32,w=int4_g128", "fp16 or bf16"),
        ("m=1,n=64,k=256,w=bf16", "4 bits, not bf16"),
        ("m=1,n=64,k=256,w=int4_g64.int8_g32", "weight-only"),
        ("m=1,n=64,k=256,w=nvfp4", None),
        ("m=16,n=64,k=256,x=fp16,w=mxfp4,epilogue=silu_mul", None),
        ("m=1,n=64,k=256,w=int8_ch", "4 bits, not int8_ch"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=16,n=64,k=256,w=int8_ch", None),
        ("m=1,n=64,k=256,x=fp16,w=int8_g32,epilogue=bias+residual", None),
        ("m=1,n=64,k=256,w=int8_g128,act_order=true", None),
        ("m=8,n=64,k=130,w=fp8", None),
        ("m=8,n=64,k=130,w=fp8_block", None),
        ("m=17,n=64,k=256,w=fp8_ch", "M <= 16"),
        ("m=1,n=64,k=256,w=fp8_ch.fp8_token", "weight-only"),
        ("m=1,n=64,k=256,w=int4_g128", "8 bits, not int4_g128"),
    ],
)
def test_accepts_of_8_bits(problem: str, reason: str | None) -> None:
    refusal = KERNEL8.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=16,n=64,k=256,w=int4_g32_min", None),
        ("m=1,n=64,k=256,x=fp16,w=int5_g32,epilogue=bias+residual", None),
        ("m=1,n=64,k=256,w=int5_g32_min,act_order=true", None),
        ("m=8,n=63,k=144,w=int6_g16", None),
        ("m=17,n=64,k=256,w=int6_g16", "M <= 16"),
        ("m=1,n=64,k=256,x=fp32,w=int4_g32_min", "fp16 or bf16"),
        (
            "m=1,n=64,k=256,w=int4_g32",
            "GGUF's formats, not int4_g32; it is compiled for int4_g32_min, int5_g32, int5_g32_min, int6_g16",
        ),
        ("m=1,n=64,k=256,w=int2_g16_min", "GGUF's formats, not int2_g16_min"),
        ("m=1,n=64,k=256,w=int6_g16.int8_g32", "weight-only"),
    ],
)
def test_accepts_of_gguf(problem: str, reason: str | None) -> None:
    refusal = GGUF.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal
    if "m=17" in problem:
        assert GEMM_GGUF.accepts(OP.problem(problem)) is None


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_every_gpu_from_sm_80_on(name: str) -> None:
    assert not KERNEL.requires.check_hardware(Target.parse(name))
    assert not KERNEL.requires.check_build(Target.parse(name), BUILD)


@pytest.mark.parametrize("name", ["sm_70", "sm_75", "gfx942", "cpu:avx2"])
def test_no_other_device(name: str) -> None:
    assert KERNEL.requires.check_hardware(Target.parse(name))


def test_a_build_without_it_is_refused() -> None:
    (reason,) = KERNEL.requires.check_build(Target.parse("sm_86"), Build.of(cuda_archs=("sm_90a",)))
    assert "no code for compute_80" in reason


def test_the_formats_are_those_of_the_layouts() -> None:
    for layout in LAYOUTS:
        forms = [form for form in FORMATS if form.layout == layout]
        schemes = [scheme for form in forms if not form.factored for scheme in form.schemes]
        assert sorted(schemes) == sorted(default_registry().layout(layout).schemes)
        for form in forms:
            for scheme in map(QuantScheme.parse, form.schemes):
                assert format_of(scheme, form.factored) is form and form.bits == scheme.bits
                is_gguf = layout == "gguf_frag16_v1"
                expected = gguf_frag16_v1.tile_bytes(scheme, form.factored) if is_gguf else tile_bytes(scheme)
                assert form.tile_bytes == expected and (form.more > 0) is is_gguf
    factored = {scheme for form in FORMATS if form.factored for scheme in form.schemes}
    assert factored == {*gguf_frag16_v1.FACTORED} == _launch.FACTORED.keys()
    for scheme in map(
        QuantScheme.parse, factored
    ):  # a configuration is made for the one, and may run the other
        both = [format_of(scheme, is_factored) for is_factored in (False, True)]
        assert len({decode.shapes_of(form) for form in both if form}) == 1
        assert len({gemm.shapes_of(form) for form in both if form}) == 1


def test_the_sources_are_those_of_the_formats() -> None:
    folder = ROOT / "kernels/linear/frag16_sm80"
    for schedule in ("decode", "gemm"):
        expected = {f"_linear_{form.name}_{schedule}_sm80.cu" for form in FORMATS}
        assert {path.name for path in folder.glob(f"_linear_*_{schedule}_sm80.cu")} == expected
    for form in FORMATS:
        text = (folder / f"_linear_{form.name}_decode_sm80.cu").read_text(encoding="utf-8")
        assert f"#define GM_WORDS {form.words}\n" in text
        assert (f"#define GM_MORE {form.more}\n" in text) is (form.more > 0)


@pytest.mark.parametrize(
    "w", ["int4_g128", "int4_g32_zp", "nvfp4", "int8_ch", "int8_g32", "int4_g32_min", "int6_g16"]
)
@pytest.mark.parametrize("m", [0, 1, 8, 9, 16])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 128), (16, 256), (512, 65536), (4096, 4096), (4096, 14336), (151936, 4096)]
)
def test_the_default_fits_and_is_among_those_to_try(w: str, m: int, n: int, k: int) -> None:
    problem, target = OP.problem(f"m={m},n={n},k={k},w={w}"), Target.parse("sm_86")
    form = form_of(w)
    kernel = kernel_of(form, "decode")
    configs = list(kernel.space(problem, target))  # type: ignore[misc]
    assert configs[0] == kernel.config(problem, target)
    for config in configs:
        shape = decode.shape_of(form, *(int(config[name]) for name in ("nt", "rt", "wk")))
        assert shape is not None and shape.nt * 8 >= m and kernel.misfit(problem, config) is None
        # 1 KiB is the system's.
        assert decode.shared_bytes(shape, max(1, m)) + 1024 <= decode.MOST_SHARED
        size = kernel.workspace(problem, config)
        assert (
            (size.bytes > decode.COUNTER_BYTES and size.zeroed)
            if int(config["split"]) > 1
            else size.bytes == 0
        )
    wide = OP.problem(f"m=9,n={n},k={k},w={w}")
    assert m > 8 or "8 columns" in (kernel.misfit(wide, configs[0]) or "")


def test_a_narrow_weight_is_split() -> None:
    config = KERNEL.config(OP.problem("m=1,n=128,k=65536,w=int4_g128"), Target.parse("sm_80"))
    assert int(config["split"]) > 1


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_the_library_has_every_shape_and_counts_the_same_shared_memory(form: Format) -> None:
    for x_type in (1, 2):
        for shape in decode.shapes_of(form):
            for m in (1, 8 * shape.nt):
                fields = {"m": m, "nt": shape.nt, "rt": shape.rt, "wk": shape.wk, "x_type": x_type}
                assert ask(form.name, "decode", **fields) == decode.shared_bytes(shape, m)


@needs_library
def test_the_library_refuses_what_it_cannot_run() -> None:
    good = {"m": 8, "nt": 1, "rt": 1, "wk": 8}
    assert ask("int4_g128", "decode", **good) > 0
    assert ask("int4_g128", "decode", **good | {"m": 9}) == GM_E_SHAPE
    assert ask("int4_g128", "decode", **good | {"rt": 3}) == GM_E_ARG
    assert ask("int4_g128", "decode", **good | {"split": 2}) == GM_E_ARG, "without counters and sums"
    assert ask("int4_g128", "decode", **good | {"x_type": 0}) == GM_E_DTYPE
    assert ask("int4_g128", "decode", **good | {"n": 0}) == GM_E_SHAPE


@pytest.mark.parametrize(
    "w", ["int4_g32_zp", "mxfp4", "int8_g128", "int8_g32", "fp8", "int4_g32_min", "int5_g32_min", "int6_g16"]
)
@pytest.mark.parametrize("m", [1, 17, 33, 65, 256, 4096])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (4096, 4096), (4096, 14336), (14336, 4096), (151936, 4096)])
def test_gemm_has_a_default_that_fits(w: str, m: int, n: int, k: int) -> None:
    problem, target = OP.problem(f"m={m},n={n},k={k},w={w}"), Target.parse("sm_86")
    form = form_of(w)
    kernel = kernel_of(form, "gemm")
    assert kernel.accepts(problem) is None
    configs = list(kernel.space(problem, target))  # type: ignore[misc]
    assert configs[0] == kernel.config(problem, target) and len({str(one) for one in configs}) == len(configs)
    for config in configs:
        shape = gemm.shape_of(form, int(config["mt"]), int(config["warps"]))
        assert shape is not None and kernel.misfit(problem, config) is None
        assert gemm.shared_bytes(shape, form) + 1024 <= gemm.MOST_SHARED
        size = kernel.workspace(problem, config)
        tiles = -(-m // shape.mt) * -(-n // shape.rows)
        if not config["share"]:
            assert size.bytes == 0 and int(config["grid"]) <= tiles
            continue
        grid = int(config["grid"])
        assert size.zeroed and size.bytes == gemm.COUNTER_BYTES + 2 * grid * shape.mt * shape.rows * 4
        assert grid * 4 <= gemm.COUNTER_BYTES and tiles % grid * -(-k // 128) >= grid, "a CTA without a part"


def test_gemm_shares_what_does_not_fill_the_machine() -> None:
    target = Target.parse("sm_80")
    assert GEMM.config(OP.problem("m=64,n=512,k=65536,w=int4_g128"), target)["share"] == 1
    assert GEMM.config(OP.problem("m=4096,n=4096,k=4096,w=int4_g128"), target)["mt"] == 128


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_the_library_has_every_shape_of_gemm_and_counts_the_same_shared_memory(form: Format) -> None:
    for x_type in (1, 2):
        for scale_type in (1, 2) if form.name.startswith("int") and not form.factored else (0,):
            for shape in gemm.SHAPES["small" if form.tile_bytes <= gemm.SMALL_TILE else "large"]:
                key = {"mt": shape.mt, "warps": shape.warps, "x_type": x_type, "scale_type": scale_type}
                answer = ask(form.name, "gemm", m=300, grid=7, **key)
                fits = shape in gemm.shapes_of(form)
                assert answer == (gemm.shared_bytes(shape, form) if fits else GM_E_ARG)
    assert len(gemm.shapes_of(form)) == (3 if form.name == "int8_g32" else 4)


@needs_library
def test_the_library_refuses_a_gemm_that_it_cannot_run() -> None:
    good = {"m": 64, "mt": 64, "warps": 4, "grid": 1}
    assert ask("int4_g128", "gemm", **good) > 0
    assert ask("int4_g128", "gemm", **good | {"warps": 5}) == GM_E_ARG
    assert ask("int8", "gemm", **good | {"scale_type": 0}) == GM_E_ARG, "without a type of scales"
    assert ask("int4_g128", "gemm", **good | {"grid": 0}) == GM_E_ARG
    assert ask("int4_g128", "gemm", **good | {"x_type": 0}) == GM_E_DTYPE
    assert ask("int4_g128", "gemm", **good | {"k": 0}) == GM_E_SHAPE
    shared = {"device": 0, "n": 512, "k": 1024, "ldx": 1024, "grid": 3, "share": 1}
    assert ask("int4_g128", "gemm", **good | shared) == GM_E_ARG, "without counters and sums"
    assert ask("int4_g128", "gemm", **good | {"device": 0, "ldx": 257}) == GM_E_ARG, (
        "rows that are not aligned"
    )


@needs_assembler
@pytest.mark.parametrize(
    ("name", "arch", "step"),
    [
        ("int4_g128", "sm_80", 5),
        ("fp8", "sm_86", 5),
        ("int4_g32_min_k", "sm_80", 5),
        *(
            pytest.param(form, arch, 1, marks=pytest.mark.slow)
            for form, arch in (
                ("int4_g128", "sm_80"),
                ("fp8", "sm_86"),
                ("int4_g32_min_k", "sm_80"),
                ("int4_g128", "sm_90"),
                ("int4_g32_zp", "sm_86"),
                ("int4_g128_zp", "sm_80"),
                ("int4_g64", "sm_120"),
                ("mxfp4", "sm_80"),
                ("nvfp4", "sm_89"),
                ("int8", "sm_80"),
                ("int8_g32", "sm_90"),
                ("int4_g32_min", "sm_80"),
                ("int5_g32", "sm_120"),
                ("int5_g32_min", "sm_86"),
                ("int5_g32_min_k", "sm_80"),
                ("int6_g16", "sm_89"),
                ("int6_g16_k", "sm_90"),
            )
        ),
    ],
)
def test_machine_code(name: str, arch: str, step: int) -> None:
    form = next(form for form in FORMATS if form.name == name)
    kernels = entries(f"_linear_{name}_decode_sm80")
    assert len(kernels) == 2 * len(decode.shapes_of(form))
    used, code = assembled(f"_linear_{name}_decode_sm80", arch, kernels[::step])
    for kernel, (registers, stack) in used.items():
        nt, rt, wk = map(int, kernel.rpartition("_")[2].split("x"))
        shape = decode.shape_of(form, nt, rt, wk)
        assert shape is not None and stack == 0, f"{kernel} spills"
        assert registers * wk * 32 * decode.ctas_of(shape, form) <= 65536, f"{kernel}: {registers} registers"
        text = code[kernel]
        # Each tile of 128 columns is 8 products for each 8 rows of x; the sums of x that offsets multiply are 8 for all tiles.
        products = rt + QuantScheme.parse(form.schemes[0]).minimums
        assert len(re.findall(r"HMMA\.16816\.F32", text)) == 8 * nt * products, kernel
        assert len(re.findall(r"LDSM\.16\.M88\.4", text)) == 4 * nt, kernel
        assert "LDGSTS" in text and "LDG.E.128" in text or "LD.E.128" in text, kernel
        assert "STL" not in text and "LDL" not in text, kernel


@needs_assembler
@pytest.mark.parametrize(
    ("name", "arch", "step"),
    [
        ("mxfp4", "sm_80", 7),
        *(
            pytest.param(form, arch, 1, marks=pytest.mark.slow)
            for form, arch in (
                ("mxfp4", "sm_80"),
                ("int4_g128", "sm_80"),
                ("int4_g32_zp", "sm_80"),
                ("int4_g64_zp", "sm_86"),
                ("int4_g128", "sm_90"),
                ("nvfp4", "sm_89"),
                ("int8", "sm_86"),
                ("int8_g32", "sm_80"),
                ("fp8", "sm_90"),
                ("int4_g32_min", "sm_80"),
                ("int4_g32_min_k", "sm_120"),
                ("int5_g32", "sm_86"),
                ("int5_g32_min", "sm_80"),
                ("int5_g32_min_k", "sm_90"),
                ("int6_g16", "sm_89"),
                ("int6_g16_k", "sm_80"),
            )
        ),
    ],
)
def test_machine_code_of_gemm(name: str, arch: str, step: int) -> None:
    form = next(form for form in FORMATS if form.name == name)
    kernels = entries(f"_linear_{name}_gemm_sm80")
    two = form.layout in ("f4_frag16_v1", "gguf_frag16_v1") or name == "fp8"
    types = 2 if two else 3 if form.bits == 4 else 4
    assert len(kernels) == types * len(gemm.shapes_of(form))
    used, code = assembled(f"_linear_{name}_gemm_sm80", arch, kernels[::step])
    for kernel, (registers, stack) in used.items():
        mt, warps = map(int, kernel.rpartition("_")[2].split("x"))
        shape = gemm.shape_of(form, mt, warps)
        assert shape is not None and stack == 0, f"{kernel} spills"
        assert registers * warps * 32 * shape.ctas <= 65536, f"{kernel}: {registers} registers"
        # A group of 128 k, for whole tiles and for parts: eight products for two tiles of W and each 8 rows of x.
        assert len(re.findall(r"HMMA\.16816\.F32", code[kernel])) == 2 * 8 * 2 * mt // 8, kernel
        assert len(re.findall(r"LDSM\.16\.M88\.4", code[kernel])) == 2 * 8 * mt // 16, kernel
        assert "LDGSTS.E.BYPASS.128" in code[kernel] and "STL" not in code[kernel], kernel
