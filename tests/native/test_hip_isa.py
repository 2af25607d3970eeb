"""The machine code of the HIP kernels: dot products of the hardware, 16-byte loads, no scratch memory, enough waves per compute unit."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kernels" / "linear" / "wv_splitk_hip" / "_linear_wv_splitk.hip"
CMAKE = (ROOT / "cmake" / "hip.cmake").read_text(encoding="utf-8")
TARGETS = {
    arch: (int(lanes), int(dot2)) for arch, lanes, dot2 in re.findall(r"\b(gfx\w+):(32|64):([01])\b", CMAKE)
}
FLAGS = re.search(r"set\(GM_HIP_FLAGS ([^)]*)\)", CMAKE)[1].split()  # type: ignore[index]
SAMPLE = ("gfx942", "gfx1100")
"""One of CDNA and one of RDNA; `make test-full` has the others."""

REGISTERS = {32: 1536, 64: 512}
"""Vector registers per lane of a SIMD: of RDNA 3 and 4 (1536 of 32 lanes), of CDNA 2 to 4 (512 of 64 lanes)."""
WAVES = {32: 8, 64: 3}
"""Fewest waves of a SIMD that hide the latency of memory."""


def clang() -> str:
    """A clang that knows all targets; the test is skipped without one."""
    for name in ("clang++-23", "clang++-22", "clang++-21"):
        if path := shutil.which(name):
            return path
    pytest.skip("clang++-21 or newer is not installed (Debian: apt-get install clang-22 lld-22)")


@dataclass(frozen=True)
class Code:
    """One kernel: its resources, as the metadata of its code object states them, and its assembly."""

    name: str
    registers: int
    spills: int
    scratch: int
    text: str


@cache
def kernels(arch: str, source: Path, flags: tuple[str, ...]) -> tuple[Code, ...]:
    """The kernels of a source, compiled for one target."""
    lanes, dot2 = TARGETS[arch]
    command = [
        clang(),
        "-x",
        "hip",
        f"--offload-arch={arch}",
        "--offload-device-only",
        "--no-gpu-bundle-output",
    ]
    command += [*flags, f"-DGM_LANES={lanes}", f"-DGM_DOT2_BF16={dot2}", f"-I{ROOT / 'kernels' / '_native'}"]
    done = subprocess.run(
        [*command, "-S", str(source), "-o", "-"], capture_output=True, text=True, check=True
    )
    codes, metadata = [], done.stdout.partition(".amdgpu_metadata")[2]
    for entry in re.split(r"\n  - \.a", metadata)[1:]:
        field = dict(re.findall(r"\.(\w+): +(\w+)", entry))
        name = re.search(r"\.name: +(wv_\w+)", entry)[1]  # type: ignore[index]
        text = done.stdout.partition(f"\n{name}:")[2].partition("\n.Lfunc_end")[0]
        scratch = int(field["private_segment_fixed_size"])
        codes.append(Code(name, int(field["vgpr_count"]), int(field["vgpr_spill_count"]), scratch, text))
    return tuple(codes)


def faults(arch: str, code: Code) -> list[str]:
    """What is wrong with a kernel's machine code."""
    lanes, dot2 = TARGETS[arch]
    found = []
    if code.spills or code.scratch or re.search(r"\bscratch_(load|store)", code.text):
        found.append(f"{code.spills} spills, {code.scratch} bytes of scratch memory")
    waves = REGISTERS[lanes] // (-(-code.registers // 8) * 8)
    if waves < WAVES[lanes]:
        found.append(f"{code.registers} registers: {waves} waves per SIMD")
    if not re.search(r"global_load_(b128|dwordx4)\b.*\b(nt|slc|th:TH_LOAD_NT)\b", code.text):
        found.append("no 16-byte loads past the caches")
    half, int8 = "_Half_" in code.name, "_Int8_" in code.name
    if half:
        promised = r"\bv_(dual_)?dot2(c|acc)?_f32_f16"
    elif dot2 and not int8:
        promised = r"\bv_(dual_)?dot2(c|acc)?_f32_bf16"
    else:
        promised = r"\bv_(pk_)?(fma|fmac|fmamk|fmaak|mad|mac)_f32"
    if not re.search(promised, code.text):
        found.append(f"no {promised}")
    return found


@pytest.mark.parametrize(
    "arch", [arch if arch in SAMPLE else pytest.param(arch, marks=pytest.mark.slow) for arch in TARGETS]
)
def test_machine_code(arch: str) -> None:
    codes = kernels(arch, SOURCE, tuple(FLAGS))
    assert len(codes) == 24
    assert not {code.name: wrong for code in codes if (wrong := faults(arch, code))}


def test_planted_faults_are_found() -> None:
    """Scratch memory; software instead of dot products; loads of less than 16 bytes; too many registers."""
    good = kernels("gfx1100", SOURCE, tuple(FLAGS))[0]
    for instruction, other in ((r"v_(dual_)?dot2\w+", "v_fma_f32"), (r"global_load_b128", "global_load_b32")):
        assert len(faults("gfx1100", Code(good.name, 80, 0, 0, re.sub(instruction, other, good.text)))) == 1
    assert faults("gfx1100", Code(good.name, 80, 0, 0, good.text + "\n\tscratch_load_b32 v1, off, s0")) == [
        "0 spills, 0 bytes of scratch memory"
    ]
    assert faults("gfx1100", Code(good.name, 250, 0, 0, good.text)) == ["250 registers: 6 waves per SIMD"]


@pytest.mark.slow
def test_a_flag_that_makes_kernels_spill_is_found() -> None:
    """The vectorizer that the build turns off."""
    spilling = kernels("gfx942", SOURCE, tuple(flag for flag in FLAGS if flag != "-fno-slp-vectorize"))
    assert any("scratch memory" in wrong for code in spilling for wrong in faults("gfx942", code))
