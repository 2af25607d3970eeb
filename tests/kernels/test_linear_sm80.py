"""The kernels over frag16 tiles for sm_80 and newer without a GPU: accepted problems, configurations that fit, the library's own arithmetic,
and the machine code of its PTX."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm80 import decode
from gristmill.kernels.linear.frag16_sm80.args import ARGS
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, format_of
from gristmill.kernels.native import library_dir
from gristmill.quant.layouts.w4_frag16_v1 import tile_bytes
from tests.kernels.test_sm90_cubins import TOOLS
from tests.kernels.test_sm90_cubins import ask as ask_tool

ROOT = Path(__file__).resolve().parents[2]
OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w4a16_decode_sm80")
BUILT = (library_dir() / "libgristmill_cuda_compute80.so").is_file()
BUILD = Build.of({"torch": "2.13.0"}, cuda_archs=("compute_80", "sm_90a"))
GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = -1, -2, -5
needs_library = pytest.mark.skipif(not BUILT, reason="the CUDA library is not built: needs nvcc")
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None or TOOLS is None, reason="needs nvcc and triton's cuobjdump and nvdisasm"
)


def ask(form: str, **fields: int) -> int:
    """Returns the library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    given = {"device": -1, "n": 64, "k": 256, "ldx": 256, "x_type": 2, "scale_type": 2, "split": 1} | fields
    return ptx_entry(f"gm_linear_{form}_decode_sm80", ARGS)(ARGS.new(**given))


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


def test_a_build_without_it_is_refused() -> None:
    (reason,) = KERNEL.requires.check_build(Target.parse("sm_86"), Build.of(cuda_archs=("sm_90a",)))
    assert "no code for compute_80" in reason


def test_the_formats_are_those_of_the_layout() -> None:
    schemes = [scheme for form in FORMATS for scheme in form.schemes]
    assert sorted(schemes) == sorted(default_registry().layout("w4_frag16_v1").schemes)
    for scheme in schemes:
        form = format_of(QuantScheme.parse(scheme))
        assert form is not None and form.tile_bytes == tile_bytes(QuantScheme.parse(scheme))


@pytest.mark.parametrize("m", [0, 1, 8, 9, 16])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 128), (16, 256), (512, 65536), (4096, 4096), (4096, 14336), (151936, 4096)]
)
def test_the_default_fits_and_is_among_those_to_try(m: int, n: int, k: int) -> None:
    problem, target = OP.problem(f"m={m},n={n},k={k},w=int4_g128"), Target.parse("sm_86")
    configs = list(KERNEL.space(problem, target))  # type: ignore[misc]
    assert configs[0] == KERNEL.config(problem, target)
    for config in configs:
        shape = decode.shape_of(*(int(config[name]) for name in ("nt", "rt", "wk")))
        assert shape is not None and shape.nt * 8 >= m and KERNEL.misfit(problem, config) is None
        # 1 KiB is the system's.
        assert decode.shared_bytes(shape, max(1, m)) + 1024 <= decode.MOST_SHARED
        size = KERNEL.workspace(problem, config)
        assert (
            (size.bytes > decode.COUNTER_BYTES and size.zeroed)
            if int(config["split"]) > 1
            else size.bytes == 0
        )
    wide = OP.problem(f"m=9,n={n},k={k},w=int4_g128")
    assert m > 8 or "8 columns" in (KERNEL.misfit(wide, configs[0]) or "")


def test_a_narrow_weight_is_split() -> None:
    config = KERNEL.config(OP.problem("m=1,n=128,k=65536,w=int4_g128"), Target.parse("sm_80"))
    assert int(config["split"]) > 1


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_the_library_has_every_shape_and_counts_the_same_shared_memory(form: object) -> None:
    name = form.name  # type: ignore[attr-defined]
    for x_type in (1, 2):
        for shape in decode.SHAPES:
            for m in (1, 8 * shape.nt):
                fields = {"m": m, "nt": shape.nt, "rt": shape.rt, "wk": shape.wk, "x_type": x_type}
                assert ask(name, **fields) == decode.shared_bytes(shape, m)


@needs_library
def test_the_library_refuses_what_it_cannot_run() -> None:
    good = {"m": 8, "nt": 1, "rt": 1, "wk": 8}
    assert ask("int4_g128", **good) > 0
    assert ask("int4_g128", **good | {"m": 9}) == GM_E_SHAPE
    assert ask("int4_g128", **good | {"rt": 3}) == GM_E_ARG
    assert ask("int4_g128", **good | {"split": 2}) == GM_E_ARG, "without counters and sums"
    assert ask("int4_g128", **good | {"x_type": 0}) == GM_E_DTYPE
    assert ask("int4_g128", **good | {"n": 0}) == GM_E_SHAPE


@cache
def machine_code(source: str, arch: str) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """(registers, stack) and instructions by kernel, of a source compiled as PTX of compute_80 and assembled for an architecture."""
    cubin = Path(tempfile.mkdtemp()) / "out.cubin"
    path = next((ROOT / "kernels").rglob(f"{source}.cu"))
    command: list[str | Path] = [
        "nvcc",
        "-std=c++20",
        "-O3",
        "-gencode",
        f"arch=compute_80,code={arch}",
        "-cubin",
        "-o",
        cubin,
        path,
    ]
    subprocess.run([*command, "-I", ROOT / "kernels", "-I", ROOT / "kernels/_native"], check=True)
    usage = ask_tool("cuobjdump", "--dump-resource-usage", cubin)
    used = {
        n: (int(r), int(s)) for n, r, s in re.findall(r"Function (\w+):\s*\n\s*REG:(\d+) STACK:(\d+)", usage)
    }
    sections = re.split(r"\.section\t\.text\.", ask_tool("nvdisasm", "-c", "-ndf", cubin))[1:]
    return used, {section.split(",", 1)[0]: section for section in sections}


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "arch"),
    [
        ("_linear_int4_g128_decode_sm80", "sm_80"),
        ("_linear_int4_g128_decode_sm80", "sm_90"),
        pytest.param("_linear_int4_g32_zp_decode_sm80", "sm_86", marks=pytest.mark.slow),
        pytest.param("_linear_int4_g64_decode_sm80", "sm_120", marks=pytest.mark.slow),
    ],
)
def test_machine_code(source: str, arch: str) -> None:
    used, code = machine_code(source, arch)
    assert len(used) == len(code) == 2 * len(decode.SHAPES)
    for name, (registers, stack) in used.items():
        nt, rt, wk = map(int, name.rpartition("_")[2].split("x"))
        shape = decode.shape_of(nt, rt, wk)
        assert shape is not None and stack == 0, f"{name} spills"
        ctas = shape.ctas if "int4_g128_d" in source else 1  # the model's numbers are those of int4_g128
        assert registers * wk * 32 * ctas <= 65536, f"{name}: {registers} registers"
        text = code[name]
        # Each tile of 128 columns is 8 products for each 8 rows of x.
        assert len(re.findall(r"HMMA\.16816\.F32", text)) == 8 * nt * rt, name
        assert len(re.findall(r"LDSM\.16\.M88\.4", text)) == 4 * nt, name
        assert "LDGSTS" in text and "LDG.E.128" in text or "LD.E.128" in text, name
        assert "STL" not in text and "LDL" not in text, name
