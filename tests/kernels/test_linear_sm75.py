"""The kernels over frag16 tiles for sm_75 without a GPU: accepted problems, configurations that fit, the library's own arithmetic, refusals of
the launchers, and the machine code. tests/native/test_sm75_fibers.py executes their schedules, test_frag16_sm80_decoders.py the decoders, which
are those for sm_80."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm75 import _launch_decode, _launch_gemm, decode, gemm
from gristmill.kernels.linear.frag16_sm75.weights import stored
from gristmill.kernels.linear.frag16_sm80.args import ARGS
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format, format_of
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, workspace_of
from gristmill.quant import pack, quantize
from tests.calls import make_call
from tests.kernels import machine_code
from tests.kernels.machine_code import (
    assembled_of,
    entries_of,
    library_of,
    needs_compiler,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER, SM80 = ROOT / "kernels/linear/frag16_sm75", ROOT / "kernels/linear/frag16_sm80"
TABLE = json.loads((FOLDER / "instances.json").read_text(encoding="utf-8"))
OP = default_registry().op("linear")
TARGET = Target.parse("sm_75")
BUILD = Build.of({"torch": "2.13.0"}, cuda_archs=("compute_75", "compute_80", "sm_90a"))
GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = -1, -2, -5
needs_library = pytest.mark.skipif(
    not library_of("75").is_file(), reason="rare: GRISTMILL_RARE=on builds the library"
)


def kernel_of(form: Format, schedule: str) -> Kernel:
    """The kernel that multiplies weights of a format."""
    kernels = (
        default_registry().kernel("linear", f"linear_{family}_{schedule}_sm75")
        for family in ("w4a16", "w8a16", "gguf")
    )
    return next(kernel for kernel in kernels if form.layout in kernel.layouts)


def ask(form: str, schedule: str, **fields: int) -> int:
    """Returns the library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    given = {"device": -1, "n": 64, "k": 256, "ldx": 256, "x_type": 1, "scale_type": 1, "split": 1, "nt": 1}
    return ptx_entry(f"gm_linear_{form}_{schedule}_sm75", ARGS, "compute_75")(ARGS.new(**(given | fields)))


@pytest.mark.parametrize(
    ("schedule", "problem", "reason"),
    [
        ("decode", "m=0,n=64,k=256,x=fp16,w=int4_g128", None),
        ("decode", "m=8,n=18,k=128,x=fp16,w=int4_g128,epilogue=bias+residual+silu_mul", None),
        ("decode", "m=1,n=64,k=256,x=fp16,w=int4_g64_zp,act_order=true", None),
        ("decode", "m=1,n=64,k=256,x=fp16,w=mxfp4", None),
        ("decode", "m=1,n=64,k=130,x=fp16,w=fp8_block", None),
        ("decode", "m=1,n=64,k=144,x=fp16,w=int6_g16", None),
        ("decode", "m=9,n=64,k=256,x=fp16,w=int4_g128", "M <= 8"),
        (
            "decode",
            "m=1,n=64,k=256,w=int4_g128",
            "fp16 activations alone, as Turing's tensor cores do, not bf16",
        ),
        ("gemm", "m=64,n=64,k=256,x=fp32,w=int8_ch", "not fp32"),
        ("gemm", "m=300,n=64,k=256,x=fp16,w=nvfp4", None),
        ("gemm", "m=17,n=64,k=256,x=fp16,w=int4_g64.int8_g32", "weight-only"),
        ("gemm", "m=17,n=64,k=256,w=fp8", "not bf16"),
    ],
)
def test_accepts(schedule: str, problem: str, reason: str | None) -> None:
    parsed = OP.problem(problem)
    form = format_of(QuantScheme.parse(parsed.text("w").partition(".")[0]))
    assert form is not None
    refusal = kernel_of(form, schedule).accepts(parsed)
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_90", "sm_121"])
def test_every_gpu_from_sm_75_on(name: str) -> None:
    kernel = kernel_of(FORMATS[0], "decode")
    assert not kernel.requires.check_hardware(Target.parse(name))
    assert not kernel.requires.check_build(Target.parse(name), BUILD)


@pytest.mark.parametrize("name", ["sm_70", "gfx942", "cpu:avx2"])
def test_no_other_device(name: str) -> None:
    assert kernel_of(FORMATS[0], "gemm").requires.check_hardware(Target.parse(name))


def test_a_build_without_it_is_refused() -> None:
    requires = kernel_of(FORMATS[0], "gemm").requires
    (reason,) = requires.check_build(TARGET, Build.of(cuda_archs=("compute_80",)))
    assert reason == "this build has no code for compute_75; it has compute_80"
    (reason,) = requires.check_build(TARGET, Build.of(cuda_archs=("compute_80",), left_out=("compute_75",)))
    assert reason == "not in this build: compute_75 (rare; GRISTMILL_RARE=on builds them)"


def test_the_table_has_the_formats_and_the_classes_of_sm_80() -> None:
    assert list(TABLE) == [form.name for form in FORMATS]
    for form in FORMATS:
        row = TABLE[form.name]
        assert (row["tile_bytes"], row["words"], row["more"]) == (form.tile_bytes, form.words, form.more)
        source = (SM80 / f"_linear_{form.name}_decode_sm80.cu").read_text(encoding="utf-8")
        (decoder,) = re.findall(r"#define GM_DECODER\(T\) gm::(.*)", source)
        assert row["decoder"] == decoder.replace("<T", "<__half")
        source = (SM80 / f"_linear_{form.name}_gemm_sm80.cu").read_text(encoding="utf-8")
        assert row["operands"] == dict(re.findall(r"K\(fp16, (\w+), gm::(.*?)\)(?: +\\)?\n", source))


def test_shapes_are_those_of_the_sources() -> None:
    text = (FOLDER / "gemm_entry.h").read_text(encoding="utf-8")
    rows = re.findall(r"K\((\d+), (\d+), (\d+), __VA_ARGS__\)", text)
    assert [gemm.Shape(*map(int, row)) for row in rows] == [*gemm.SHAPES["small"], *gemm.SHAPES["large"]]
    text = (FOLDER / "decode_entry.h").read_text(encoding="utf-8")
    rows = re.findall(r"K\((\d+), (\d+), (\d+)\)", text)
    assert [decode.Shape(*map(int, row)) for row in rows] == list(decode.SHAPES)


@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_every_shape_fits_a_multiprocessor_of_turing(form: Format) -> None:
    for shape in decode.shapes_of(form):
        assert decode.shared_bytes(shape, decode.ROWS) + decode.STATIC_SHARED <= decode.SHARED
        assert decode.ctas_of(shape, form) >= 1
    for wide in gemm.shapes_of(form):
        all_ctas = wide.ctas * (gemm.shared_bytes(wide, form) + decode.STATIC_SHARED)
        assert all_ctas <= decode.SHARED and wide.ctas * wide.warps * 32 <= decode.THREADS, wide


@pytest.mark.parametrize("w", ["int4_g128", "int4_g32_zp", "mxfp4", "int8_g32", "fp8", "int6_g16"])
@pytest.mark.parametrize("m", [0, 1, 8, 9, 33, 256, 4096])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (512, 65536), (4096, 4096), (151936, 4096)])
def test_the_default_fits_and_is_among_those_to_try(w: str, m: int, n: int, k: int) -> None:
    problem = OP.problem(f"m={m},n={n},k={k},x=fp16,w={w}")
    form = format_of(QuantScheme.parse(w))
    assert form is not None
    for schedule in ("decode", "gemm") if m <= decode.ROWS else ("gemm",):
        kernel = kernel_of(form, schedule)
        configs = list(kernel.space(problem, TARGET))  # type: ignore[misc]
        assert configs[0] == kernel.config(problem, TARGET)
        assert len({str(one) for one in configs}) == len(configs)
        for config in configs:
            size = kernel.workspace(problem, config)
            if schedule == "decode":
                assert decode.shape_of(form, int(config["rt"]), int(config["wk"])) is not None
                split = int(config["split"])
                assert size.bytes > COUNTER_BYTES and size.zeroed if split > 1 else size.bytes == 0
                continue
            shape = gemm.shape_of(form, int(config["mt"]), int(config["warps"]))
            assert shape is not None
            tiles, grid = -(-max(m, 1) // shape.mt) * -(-n // shape.rows), int(config["grid"])
            assert size.bytes == workspace_of(config)
            if not config["share"]:
                assert grid <= tiles
            else:
                assert size.zeroed and grid * 4 <= COUNTER_BYTES
                assert tiles % grid * -(-k // 128) >= grid, "a CTA without a part"


def test_narrow_and_wide_weights_get_other_configurations() -> None:
    def config(schedule: str, problem: str) -> dict[str, object]:
        return dict(kernel_of(FORMATS[0], schedule).config(OP.problem(problem), TARGET))

    assert config("decode", "m=1,n=128,k=65536,x=fp16,w=int4_g128")["split"] != 1
    assert config("decode", "m=1,n=151936,k=4096,x=fp16,w=int4_g128")["split"] == 1
    assert config("gemm", "m=64,n=512,k=65536,x=fp16,w=int4_g128")["share"] == 1
    assert config("gemm", "m=9,n=4096,k=4096,x=fp16,w=int4_g128")["mt"] == 16
    assert config("gemm", "m=4096,n=4096,k=4096,x=fp16,w=int4_g128")["mt"] == 64


def test_products_have_a_format_of_their_own() -> None:
    scales = torch.empty(0, dtype=torch.float16), torch.empty(0)
    assert [stored("int4_g32_min", one).name for one in scales] == ["int4_g32_min", "int4_g32_min_k"]
    assert [stored("int8", one).name for one in scales] == ["int8", "int8"]


@pytest.mark.parametrize("launch", [_launch_decode.launch, _launch_gemm.launch])
def test_weights_that_do_not_fit_are_refused(launch: Callable[..., None]) -> None:
    weight = pack(quantize(torch.randn(48, 256), "int4_g128"), "w4_frag16_v1")
    problem = OP.problem("m=1,n=48,k=256,x=fp16,w=int4_g128")
    config = kernel_of(FORMATS[0], launch.__module__.rpartition("_")[2]).config(problem, TARGET)
    x, out = torch.randn(1, 128).half(), torch.empty(1, 48).half()
    call = make_call("linear", x, [*weight.slots.values()], None, None, False, 48, None, out)
    with pytest.raises(ValueError, match="expected 3168 bytes of tiles for a \\[48, 128\\] weight, got 6336"):
        launch(config, call)


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_the_library_has_every_shape_and_counts_the_same_shared_memory(form: Format) -> None:
    for shape in decode.SHAPES:
        for m in (1, decode.ROWS):
            answer = ask(form.name, "decode", m=m, rt=shape.rt, wk=shape.wk)
            fits = shape in decode.shapes_of(form)
            assert answer == (decode.shared_bytes(shape, m) if fits else GM_E_ARG)
    for scale_type in (1, 2) if form.name.startswith("int") and not form.factored else (0,):
        for wide in {*gemm.SHAPES["small"], *gemm.SHAPES["large"]}:
            key = {"mt": wide.mt, "warps": wide.warps, "scale_type": scale_type}
            compiled = gemm.shape_of(form, wide.mt, wide.warps) is not None
            answer = ask(form.name, "gemm", m=300, grid=7, **key)
            assert answer == (gemm.shared_bytes(wide, form) if compiled else GM_E_ARG)


@needs_library
def test_the_library_refuses_what_it_cannot_run() -> None:
    good = {"m": 8, "rt": 1, "wk": 8}
    assert ask("int4_g128", "decode", **good) > 0
    assert ask("int4_g128", "decode", **good | {"m": 9}) == GM_E_SHAPE
    assert ask("int4_g128", "decode", **good | {"nt": 2}) == GM_E_ARG
    assert ask("int4_g128", "decode", **good | {"rt": 3}) == GM_E_ARG
    assert ask("int4_g128", "decode", **good | {"split": 2}) == GM_E_ARG, "without counters and sums"
    assert ask("int4_g128", "decode", **good | {"x_type": 2}) == GM_E_DTYPE
    wide = {"m": 64, "mt": 64, "warps": 4, "grid": 1}
    assert ask("int4_g128", "gemm", **wide) > 0
    assert ask("int4_g128", "gemm", **wide | {"warps": 5}) == GM_E_ARG
    assert ask("int4_g128", "gemm", **wide | {"x_type": 2}) == GM_E_ARG
    assert ask("int8", "gemm", **wide | {"scale_type": 0}) == GM_E_ARG, "without a type of scales"
    assert ask("int4_g128", "gemm", **wide | {"device": 0, "ldx": 257}) == GM_E_ARG, (
        "rows that are not aligned"
    )


@cache
def compiled(template: Path, form: Format, folder: Path) -> Path:
    """The PTX of a template for a format, as CMake fills it."""
    row = TABLE[form.name]
    operands = " ".join(f"K({scales}, gm::{name})" for scales, name in row["operands"].items())
    text = template.read_text(encoding="utf-8")
    for name, value in {**row, "format": form.name, "operands": operands}.items():
        text = text.replace(f"@{name}@", str(value))
    assert "@" not in text
    source = folder / template.name.removesuffix(".in")
    source.write_text(text, encoding="utf-8")
    folders = (ROOT / "kernels/_native", ROOT / "kernels", template.parent)
    options = ("-std=c++20", "-O3", "-arch=compute_75", "-ptx")
    return machine_code.compiled(source, source.with_suffix(".ptx"), *options, folders=folders)


def quick(*names: str) -> list[object]:
    """All formats; those that are not named are slow."""
    return [
        pytest.param(form, id=form.name, marks=() if form.name in names else pytest.mark.slow)
        for form in FORMATS
    ]


@needs_compiler
@pytest.mark.parametrize("form", quick("int4_g128", "int5_g32_min"))
def test_machine_code_of_decode(form: Format, tmp_path: Path) -> None:
    ptx = compiled(FOLDER / "_linear_decode_sm75.cu.in", form, tmp_path)
    shapes = {f"decode_fp16_{shape.rt}x{shape.wk}": shape for shape in decode.shapes_of(form)}
    assert {*entries_of(ptx)} == shapes.keys()
    used, code = assembled_of(ptx, "sm_75", [*shapes])
    for name, (registers, stack) in used.items():
        shape, text = shapes[name], code[name]
        assert stack == 0 and "STL" not in text, f"{name} spills"
        assert registers * shape.wk * 32 * decode.ctas_of(shape, form) <= 65536, (
            f"{name}: {registers} registers"
        )
        # Each tile of 128 columns is 16 products; sums of x that offsets multiply are 16 for all tiles.
        products = shape.rt + QuantScheme.parse(form.schemes[0]).minimums
        assert len(re.findall(r"HMMA\.1688\.F32", text)) == 16 * products, name
        assert len(re.findall(r"LDSM\.16\.M88\.4", text)) == 4, name
        assert "HMMA.16816" not in text and "LDGSTS" not in text and "LDG.E.128" in text, name


@needs_compiler
@pytest.mark.parametrize("form", quick("mxfp4"))
def test_machine_code_of_gemm(form: Format, tmp_path: Path) -> None:
    ptx = compiled(FOLDER / "_linear_gemm_sm75.cu.in", form, tmp_path)
    shapes = {
        f"gemm_fp16_{scales}_{shape.mt}x{shape.warps}": shape
        for scales in TABLE[form.name]["operands"]
        for shape in gemm.shapes_of(form)
    }
    assert {*entries_of(ptx)} == shapes.keys()
    used, code = assembled_of(ptx, "sm_75", [*shapes])
    for name, (registers, stack) in used.items():
        shape, text = shapes[name], code[name]
        assert stack == 0 and "STL" not in text, f"{name} spills"
        assert registers * shape.warps * 32 * shape.ctas <= 65536, f"{name}: {registers} registers"
        # A group of 128 k, for whole tiles and for parts: 16 products for two tiles of W and each 8 rows of x.
        assert len(re.findall(r"HMMA\.1688\.F32", text)) == 2 * 16 * 2 * shape.mt // 8, name
        assert len(re.findall(r"LDSM\.16\.M88\.4", text)) == 2 * 8 * shape.mt // 16, name
        assert "HMMA.16816" not in text and "LDGSTS" not in text, name
        # Both pairs of loops have products behind the loads of the next step, whose stores follow.
        assert text.rindex("LDG.E.128.CONSTANT") < text.rindex("HMMA.1688"), name
