"""The ISA levels that this processor can run, from /proc/cpuinfo and the build's manifest."""

from __future__ import annotations

from pathlib import Path

from gristmill.kernels import native

_FLAGS = {
    "base": {"sse4_2", "ssse3", "popcnt"},
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_vnni": {"avx512f", "avx512_vnni"},
    "avx512_bf16": {"avx512f", "avx512_vnni", "avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
    "neon": {"asimd"},
    "neon_dotprod": {"asimd", "asimddp"},
    "neon_i8mm": {"asimd", "asimddp", "i8mm"},
    "sve": {"sve", "i8mm"},
}


def runnable_levels() -> list[str]:
    """Returns the levels that were built and that this processor has."""
    present: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            present = set(line.split(":", 1)[1].split())
            break
    return [level for level in native.manifest().get("cpu_levels", []) if _FLAGS[level] <= present]
