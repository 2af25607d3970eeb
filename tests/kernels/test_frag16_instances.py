"""The table of instances of linear over frag16 tiles: the sources that CMake generates from it, and the
argument struct of C++ and Python."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import select
from gristmill.kernel_registry.store import Store
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm90 import decode, decode_ws, gemm_ws
from gristmill.kernels.linear.frag16_sm90.args import ARGS
from gristmill.kernels.linear.frag16_sm90.instances import TABLE, formats, schedule, table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "kernels" / "linear" / "frag16_sm90"

PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(table LANGUAGES NONE)
include("{root}/cmake/frag16_sm90.cmake")
set(RARE on CACHE STRING "")
set(left_out _paged_attention_d80_rare_sm90)
gm_frag16_sources(sources ${{RARE}} left_out)
file(WRITE "${{CMAKE_BINARY_DIR}}/sources.txt" "${{sources}}")
file(WRITE "${{CMAKE_BINARY_DIR}}/left_out.txt" "${{left_out}}")
"""


def test_what_a_configuration_chooses_is_in_the_struct() -> None:
    fields = {name for _, name in ARGS.fields}
    for one in (decode, decode_ws, gemm_ws):
        assert set(one.SCHEDULE.key) <= fields
        assert set(one.SCHEDULE.fields) == set(one.Shape._fields)
        for form in one.SCHEDULE.formats:
            _, config = one.ranked(form, 8, 4096, 4096, 132)[0]
            assert set(one.SCHEDULE.key) < set(config) <= fields


def test_every_scheme_is_of_one_format_and_its_layout_holds_it() -> None:
    schemes = [scheme for form in formats().values() for scheme in form.schemes]
    assert len(set(schemes)) == len(schemes) >= 15
    for form in formats().values():
        layout = default_registry().layout(form.layout)
        assert all(layout.accepts(scheme) for scheme in form.schemes), form.name
        for name, spec in table()["schedules"].items():
            if table()["formats"][form.name].get(spec["decoder"]):
                assert form in schedule(name).formats and form.cost[name], (form.name, name)


def generate(folder: Path, *options: str) -> dict[str, Path]:
    build = folder / "build"
    subprocess.run(["cmake", "-S", folder, "-B", build, *options], check=True, capture_output=True)
    paths = [Path(one) for one in (build / "sources.txt").read_text().split(";")]
    assert set(build.rglob("*.cu")) == set(paths)
    return {path.stem: path for path in paths}


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_cmake_writes_a_source_per_format_and_schedule_and_only_what_changed(tmp_path: Path) -> None:
    copy = tmp_path / "kernels" / "linear" / "frag16_sm90"
    copy.mkdir(parents=True)
    for path in (*FOLDER.glob("*.cu.in"), TABLE):
        shutil.copy(path, copy)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    first = generate(tmp_path)
    assert set(first) == {
        f"linear_{form.name}_{name}_sm90" for name in table()["schedules"] for form in schedule(name).formats
    }
    kernels = [
        line for path in first.values() for line in path.read_text().splitlines() if "  K(linear_" in line
    ]
    assert len(kernels) == len(set(kernels)) == 690
    text = first["linear_int4_g128_decode_ws_sm90"].read_text()
    assert "@" not in text and "#define GM_ENTRY gm_linear_int4_g128_decode_ws_sm90\n" in text
    assert "using Decoder_bf16_fp16 = Int4Tile<__nv_bfloat16, 1, false, kScaleFp16>;" in text
    assert "K(linear_decode_ws_int4_g128_fp16_1x7x2x4, 1, 0, __half, gm::Decoder_fp16, 1, 7, 2, 4)" in text

    assert (tmp_path / "build" / "left_out.txt").read_text() == "_paged_attention_d80_rare_sm90"

    stamps = {name: path.stat().st_mtime_ns for name, path in first.items()}
    changed = json.loads((copy / TABLE.name).read_text())
    changed["formats"]["fp8"]["tile_bytes"] += 16
    del changed["formats"]["mxfp4"]["wgmma"]
    (copy / TABLE.name).write_text(json.dumps(changed))
    (tmp_path / "build" / "frag16_sm90" / "linear_mxfp4_gemm_ws_sm90.cu").unlink()
    second = generate(tmp_path)
    assert set(first) - set(second) == {"linear_mxfp4_gemm_ws_sm90"}
    rewritten = {name for name, path in second.items() if path.stat().st_mtime_ns != stamps[name]}
    assert rewritten == {f"linear_fp8_{name}_sm90" for name in table()["schedules"]}

    changed["formats"]["fp8"]["mma"] = {"bf16": "Fp8Tile<T>"}
    (copy / TABLE.name).write_text(json.dumps(changed))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        generate(tmp_path)
    assert b"expected <type of x>/<type of scales>, found bf16" in refused.value.stderr


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_rare_formats_can_be_left_out_of_a_build(tmp_path: Path) -> None:
    """The sources of rare formats are not generated, but they are named for the manifest, by the names that
    kernels require of a build."""
    copy = tmp_path / "kernels" / "linear" / "frag16_sm90"
    copy.mkdir(parents=True)
    for path in (*FOLDER.glob("*.cu.in"), TABLE):
        shutil.copy(path, copy)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    generated = generate(tmp_path, "-DRARE=off")
    first, *left_out = (tmp_path / "build" / "left_out.txt").read_text().split(";")
    assert first == "_paged_attention_d80_rare_sm90", "what was left out before stays"
    rare = {form.name for form in formats().values() if form.rare}
    assert rare == {"int4_g64", "int4_g64_zp", "int4_g32_zp", "int8_g32"}
    assert {*left_out} == {f"linear_{form}_{name}_sm90" for form in rare for name in table()["schedules"]}
    assert not set(generated) & set(left_out) and len(generated) == 3 * len(formats()) - len(left_out)

    op, full = default_registry().op("linear"), Build.of({"torch": "2.13.0"}, cuda_archs=("sm_90a",))
    part, h200 = replace(full, left_out=tuple(left_out)), Target.parse("h200")
    kernels = [k for k in default_registry().kernels_of("linear") if k.requires.code == "cuda:sm_90a"]
    absent = set()
    for form in formats().values():
        problem = op.problem(f"m=8,n=256,k=512,w={form.schemes[0]}")
        for kernel in kernels:
            if not kernel.why_not(problem, h200, full):
                reasons = kernel.why_not(problem, h200, part)
                assert bool(reasons) == form.rare, (kernel.name, problem)
                absent |= {reason.split()[4] for reason in reasons}
    assert absent == {*left_out}


def test_selection_names_what_the_build_lacks() -> None:
    op = default_registry().op("linear")
    build = Build.of({"torch": "2.13.0"}, cuda_archs=("sm_90a",), left_out=("linear_int4_g64_decode_sm90",))
    for scheme, verdict in (("int4_g64", "build"), ("int4_g128", "unverified")):
        selection = select(
            op,
            op.problem(f"m=8,n=256,k=512,w={scheme}"),
            default_registry().kernels_of("linear"),
            Target.parse("h200"),
            build,
            Store(),
            Policy(),
        )
        candidate = next(c for c in selection.candidates if c.kernel.name == "linear_w4a16_decode_sm90")
        assert candidate.verdict == verdict
        if verdict == "build":
            assert candidate.reasons == (
                "not in this build: linear_int4_g64_decode_sm90 (rare; GRISTMILL_RARE=on builds them)",
            )
