"""Levels of linear_a8 that this processor may lack: the instructions that they are compiled to, and their algorithm at 512 bits.

The algorithm is compiled for 16 lanes in plain vector arithmetic, with products of four bytes per lane as vpdpbusd has them, and must give
the same bits as the base level, which has neither FMA nor 512 bits. What remains unproven is the instruction itself.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.a8_cpu import groups16 as linear_a8_groups_cpu
from gristmill.kernels.linear.a8_cpu import rows16 as linear_a8_cpu
from gristmill.kernels.linear.op import OP
from gristmill.kernels.native import cpu_library
from gristmill.kernels.native_call import CallEntry, Options
from gristmill.quant import pack, quantize
from tests.kernels.test_linear_a8_groups import FACTORED, output, weight
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
LINEAR = ROOT / "kernels" / "linear" / "a8_cpu"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def compiled(out: Path, flags: list[str], folder: Path = LINEAR) -> Path:
    """The kernel of a folder of sources, with serial threads, as a library; without optimization, which takes nine times longer to compile."""
    sources = folder / "_linear_a8_cpu.cpp", ROOT / "tests" / "native" / "serial_threads.cpp"
    flags = ["-O0", "-Wno-psabi", "-ffp-contract=off", *flags]
    return compiled_library.make(out, *sources, flags=flags, folders=compiled_library.FOLDERS[1:])


def called(library: ctypes.CDLL, level: str, entry: CallEntry, config: Any, call: Any) -> None:
    """Call an entry of a library at a level."""
    named = library[f"options_of_{entry.name}__{level}"]
    named.restype = ctypes.c_char_p
    options = Options(named().decode()).pack(config)
    assert library[f"{entry.name}__{level}"](ctypes.c_char_p(entry.pack(call)), ctypes.c_char_p(options)) == 0


def product(library: ctypes.CDLL, level: str, scheme: str, m: int) -> torch.Tensor:
    """A product of random numbers by an entry, with the output poisoned."""
    n, k = 35, 320
    generator = torch.Generator().manual_seed(m)
    weight = quantize(torch.randn(n, k, generator=generator), scheme.partition(".")[0])
    problem = OP.problem(f"m={m},n={n},k={k},x=fp32,w={scheme}")
    config = linear_a8_cpu.config(problem, Target.parse("cpu:base"))
    x, out = torch.randn(m, k, generator=generator), torch.full((m, n), float("nan"))
    call = OP.Call(x, pack(weight, "cpu_rows16_v1").tensors, out=out)
    called(library, level, linear_a8_cpu.ENTRY, config, call)
    return out


def results(library: ctypes.CDLL, level: str) -> list[torch.Tensor]:
    """Products of all formats, by few rows and by many."""
    schemes = (
        "int4_g32_zp.int8_g32",
        "int4_g64.int8_token",
        "int8_ch.int8_token",
        "mxfp4.int8_g32",
        "nvfp4.int8_g32",
    )
    return [product(library, level, scheme, m) for scheme in schemes for m in (1, 2, 4, 7, 13, 25)]


def group_results(library: ctypes.CDLL, level: str, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Products of K-quants as they are stored, whose scales multiply sums as integers."""
    entry = linear_a8_groups_cpu.ENTRY
    monkeypatch.setattr(entry, "cpu", lambda config, call: called(library, level, entry, config, call))
    x = torch.randn(13, 512, generator=torch.Generator().manual_seed(0))
    return [output(weight(kind, 19, 512), x[:m]) for kind in FACTORED for m in (1, 13)]


def emulated(tmp_path: Path, folder: Path = LINEAR) -> ctypes.CDLL:
    """The entries at 16 lanes without instructions of a level."""
    flags = ["-march=x86-64", "-DGM_LANES=16", "-DGM_LEVEL=emulated", "-I", str(LINEAR)]
    return ctypes.CDLL(str(compiled(tmp_path / "emulated.so", flags, folder)))


def test_the_algorithm_at_512_bits_gives_the_bits_of_the_base_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = emulated(tmp_path)
    base = results(cpu_library(), "base") + group_results(cpu_library(), "base", monkeypatch)
    actual = results(library, "emulated") + group_results(library, "emulated", monkeypatch)
    for expected, found in zip(base, actual, strict=True):
        assert not expected.isnan().any() and torch.equal(found, expected)


@pytest.mark.slow
def test_a_wrong_lane_is_seen(tmp_path: Path) -> None:
    """Planted: the second byte of a weight is multiplied by the first byte of x."""
    for name in ("_linear_a8_cpu.cpp", "_linear_a8_math.h"):
        shutil.copy(LINEAR / name, tmp_path / name)
    header = tmp_path / "_linear_a8_math.h"
    right = "((x << (24 - b)) >> 24)"
    assert header.read_text().count(right) == 1
    header.write_text(header.read_text().replace(right, "((x << (24 - (b == 8 ? 0 : b))) >> 24)"))
    wrong = results(emulated(tmp_path, tmp_path), "emulated")
    assert not any(map(torch.equal, results(cpu_library(), "base"), wrong))


def code_of(level: str) -> str:
    """The instructions in the library of the source at a level: what lies between the end of the function before its entries, and theirs."""
    library = str(cpu_library()._name)
    table = subprocess.run(
        ["nm", "-D", "-S", "--defined-only", library], check=True, capture_output=True, text=True
    )
    rows = [row.split() for row in table.stdout.splitlines()]
    functions = sorted((int(row[0], 16), int(row[1], 16), row[3]) for row in rows if len(row) == 4)
    own = [i for i, row in enumerate(functions) if re.search(rf"gm_linear_a8_\w+__{level}$", row[2])]
    if not own:
        pytest.skip(f"the library was built without {level}")
    assert own == list(range(own[0], own[-1] + 1)), "the entries of a source lie beside each other"
    begin, end = sum(functions[own[0] - 1][:2]), sum(functions[own[-1]][:2])
    command = [
        "objdump",
        "-d",
        "--no-show-raw-insn",
        f"--start-address={begin}",
        f"--stop-address={end}",
        library,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(
    shutil.which("objdump") is None or shutil.which("nm") is None, reason="binutils are not installed"
)
@pytest.mark.parametrize(
    ("level", "present", "absent"),
    [
        ("avx512_vnni", "vpdpbusd", "vpmaddubsw"),
        ("avx512", "vpmaddubsw", "vpdpbusd"),
        ("avx2", "vpmaddubsw", "vpdpbusd"),
    ],
)
def test_instructions_of_a_level(level: str, present: str, absent: str) -> None:
    code = code_of(level)
    assert code.count(present) > 100 and absent not in code
    assert ("zmm" in code) == level.startswith("avx512")
