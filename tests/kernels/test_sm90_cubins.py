"""The compiled Hopper kernels, read back: the instructions that they promise, registers, and no spills beyond those on record."""

from __future__ import annotations

import re
import struct
import subprocess
from functools import cache
from pathlib import Path

import pytest

from gristmill.kernels.linear import frag16_fed_shapes as fed
from gristmill.kernels.linear import frag16_tma_shapes as tma
from gristmill.kernels.linear.frag16_shapes import ALL, FEW
from gristmill.kernels.native import library_dir

LIBRARY = library_dir() / "libgristmill_cuda_sm90a.so"
STACK_ON_RECORD = {
    "linear_tma": 16,
    "linear_fed_int4_g128_bf16_2x8x2x4": 8,
    "linear_fed_int4_g128_bf16_half_2x8x2x4": 8,
}
"""Bytes of stack allowed, by the start of a kernel's name; 0 for the others."""


def _cuobjdump() -> Path | None:
    try:
        import triton
    except ImportError:
        return None
    path = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return path if path.is_file() else None


TOOL = _cuobjdump()
pytestmark = pytest.mark.skipif(
    not LIBRARY.is_file() or TOOL is None, reason="needs the CUDA library and triton's cuobjdump"
)


@cache
def dump(flag: str) -> str:
    """What cuobjdump says of every cubin inside the library."""
    raw, found = LIBRARY.read_bytes(), []
    folder = Path(__import__("tempfile").mkdtemp())
    for number, match in enumerate(
        re.finditer(rb"\x7fELF\x02\x01\x01[\x33\x41]", raw)
    ):  # ELF of the CUDA ABI
        start = match.start()
        headers, size, count = (
            struct.unpack_from("<Q", raw, start + 40)[0],
            *struct.unpack_from("<HH", raw, start + 58),
        )
        segments = (
            struct.unpack_from("<Q", raw, start + 32)[0]
            + struct.unpack_from("<HH", raw, start + 54)[0] * (struct.unpack_from("<HH", raw, start + 54)[1])
        )
        path = folder / f"{number}.cubin"
        path.write_bytes(raw[start : start + max(headers + size * count, segments)])
        done = subprocess.run([str(TOOL), flag, str(path)], capture_output=True, text=True, check=True)
        found.append(done.stdout)
    return "\n".join(found)


def usage() -> dict[str, tuple[int, int]]:
    """Registers and stack bytes by kernel."""
    pairs = re.findall(
        r"Function (linear_\w+|gather_columns):\s*\n\s*REG:(\d+) STACK:(\d+)", dump("--dump-resource-usage")
    )
    return {name: (int(registers), int(stack)) for name, registers, stack in pairs}


def test_registers_and_stack() -> None:
    found = usage()
    # By pairs of types of x and of scales. Few rows: int4_g128 for three, nine formats for two; all shapes of int4_g128, with and
    # without zero points, and of mxfp4, nvfp4, int8 and fp8.
    decode = [name for name in found if not name.startswith(("linear_tma", "linear_fed", "gather"))]
    assert len(decode) == (3 + 5 * 2) * len(ALL) + 4 * 2 * len(FEW), sorted(decode)
    special = [name for name in found if name.startswith("linear_fed")]
    assert len(special) == (3 + 5 * 2) * len(fed.ALL) + 4 * 2 * len(fed.FEW), sorted(special)
    # Many rows: int4 for three, int8 for four, the others for two.
    many = [name for name in found if name.startswith("linear_tma")]
    assert len(many) == (2 * 3 + 4 + 3 * 2) * len(tma.ALL) + 4 * 3 * len(tma.FEW), sorted(many)
    for name, (registers, stack) in found.items():
        assert registers <= 255
        allowed = max((b for start, b in STACK_ON_RECORD.items() if name.startswith(start)), default=0)
        assert stack <= allowed, (name, stack)


def test_promised_instructions() -> None:
    functions = re.split(r"Function : ", dump("-sass"))[1:]
    assert functions
    for text in functions:
        name = text.split("\n", 1)[0].strip()
        if name == "gather_columns":
            continue
        assert "UBLKCP" in text, f"{name}: no bulk copy"
        assert ("HGMMA" if "tma" in name else "HMMA.16816") in text, f"{name}: no tensor-core product"
        if "tma" in name or "fed" in name:
            assert "UTMALDG.2D" in text, f"{name}: no tensor copy"
            assert "USETMAXREG" in text, f"{name}: registers are not handed over"
        if "tma" in name:
            assert len(re.findall("HGMMA", text)) == 8, f"{name}: products taken apart"
            products = text[text.index("HGMMA") : text.rindex("HGMMA")]
            assert "R2UR" not in products and "LDL" not in products, (
                f"{name}: descriptors or spills between products"
            )
            assert "gsb0, 0x0" not in products, f"{name}: products wait for each other"
            assert len(re.findall(r"STG\.E desc", text)) == 1, (
                f"{name}: y in pieces of 4 bytes"
            )  # the one store sets a flag back
        if "tma" not in name and ("fp4" in name or "fp8" in name):
            multiply = "HMUL2.BF16" if "_bf16_" in name else "HMUL2"
            assert multiply in text, f"{name}: pairs are to be multiplied by their scales at once"
