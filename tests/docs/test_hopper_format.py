"""CONTRIBUTING's weight format for Hopper, extracted from the page, added to a copy of the tree, generated,
compiled and called."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.layouts.w4_frag16_v1 import tile_bytes

ROOT = Path(__file__).parents[2]
FOLDER = Path("kernels/linear/frag16_sm90")
COPIED = ("kernel_registry", "quant", "kernels", "autotune", "src", "cmake", "CMakeLists.txt")

needs_nvcc = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("nvcc", "cmake", "ninja")), reason="nvcc, cmake and ninja"
)

ASK = """
import sys
# An editable installation finds its own tree before PYTHONPATH is looked at.
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
op, target = default_registry().op("linear"), Target.parse("h200")
for schedule, m in (("decode", 4), ("decode_ws", 16), ("gemm_ws", 64)):
    kernel = default_registry().kernel("linear", f"linear_w4a16_{schedule}_sm90")
    problem = op.problem(f"m={m},n=4096,k=4096,w=int4_g16")
    if kernel.accepts(problem) is None:
        space = list(kernel.space(problem, target))
        assert kernel.config(problem, target) == space[0] and kernel.estimate(problem, target) > 0
        print(schedule, len(space), space[0]["format"], space[0]["tile_bytes"])
"""


def pieces() -> tuple[str, str]:
    """Returns the decoder class and the table row from the page."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (decoder,) = re.findall(rf"```cuda\n// {FOLDER}/decoders_mma.cuh\n(.*?)```", page, re.S)
    (row,) = re.findall(r"```json\n(\"int4_g16\".*?)```", page, re.S)
    return decoder, row


def tree(folder: Path, decoder: str, row: str) -> Path:
    """Copies what CMake and the kernels' specs read, with the format added to the two files that the recipe
    names."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__", "_lib")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(ROOT / name, folder / name)
    header, table = folder / FOLDER / "decoders_mma.cuh", folder / FOLDER / "instances.json"
    body, end, rest = header.read_text(encoding="utf-8").rpartition("}  // namespace gm")
    header.write_text(f"{body}{decoder}\n{end}{rest}", encoding="utf-8")
    text = table.read_text(encoding="utf-8")
    table.write_text(text.replace('"formats": {', f'"formats": {{\n{row},', 1), encoding="utf-8")
    return folder


def build(folder: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", "-DSKBUILD_STATE=wheel"]
    subprocess.run([*command, "-DGRISTMILL_CUDA=on"], check=True, capture_output=True)
    return subprocess.run(["ninja", "-C", folder / "build", *targets], capture_output=True, text=True)


def test_the_row_and_the_layout_agree() -> None:
    row = json.loads("{" + pieces()[1] + "}")["int4_g16"]
    assert row["tile_bytes"] == tile_bytes(QuantScheme.parse("int4_g16"))
    table = json.loads((ROOT / FOLDER / "instances.json").read_text(encoding="utf-8"))
    assert "int4_g16" not in table["formats"]
    for form, fields in table["formats"].items():
        assert set(row) <= set(fields), form


def test_the_kernels_take_it(tmp_path: Path) -> None:
    folder = tree(tmp_path / "tree", *pieces())
    changed = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.read_bytes() != (ROOT / path.relative_to(folder)).read_bytes()
    ]
    assert sorted(changed) == [f"{FOLDER}/decoders_mma.cuh", f"{FOLDER}/instances.json"], (
        "the recipe's two files"
    )
    process = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    lines = [line.split() for line in process.stdout.splitlines()]
    assert [line[0] for line in lines] == ["decode", "decode_ws"], "it has no decoder for wgmma"
    assert all(int(count) > 5 and rest == ["int4_g16", "1280"] for _, count, *rest in lines)


@needs_nvcc
def test_it_compiles_and_a_tile_of_another_size_does_not(tmp_path: Path) -> None:
    decoder, row = pieces()
    row = row.replace('"fp16/any": "Int4G16Tile<T>"', "").replace('"Int4G16Tile<T>", }', '"Int4G16Tile<T>"}')
    folder = tree(tmp_path / "tree", decoder, row)
    targets = [f"cuda_sm90a/linear_int4_g16_decode_sm90.{kind}" for kind in ("cubin", "o")]
    result = build(folder, *targets)
    assert result.returncode == 0, result.stdout
    cubin = (folder / "build" / targets[0]).read_bytes()
    assert b"linear_decode_int4_g16_bf16_1x4x8" in cubin and b"linear_decode_int4_g16_bf16_2x2x8" in cubin
    source = folder / "build" / "frag16_sm90" / "linear_int4_g16_decode_ws_sm90.cu"
    assert "gm_linear_int4_g16_decode_ws_sm90" in source.read_text(encoding="utf-8")

    header = folder / FOLDER / "decoders_mma.cuh"
    text = header.read_text(encoding="utf-8")
    header.write_text(
        text.replace("kCodeBytes + kGroups * kTileRows * 2;", "kCodeBytes + kGroups * kTileRows;")
    )
    assert header.read_text(encoding="utf-8") != text
    result = build(folder, targets[0])
    assert result.returncode != 0 and "tile_bytes of instances.json" in result.stdout
