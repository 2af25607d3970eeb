"""AMD architectures, by gfx name: features from the ISA guides and LLVM's AMDGPU target descriptions.

gfx942 reads fp8 as fnuz (bias 8), gfx950 and gfx12 as OCP (bias 7): the same byte is another number.
"""

from __future__ import annotations

from .facts import ArchFacts

_KIB = 1024

_GCN = frozenset({"wave64", "dot2", "sdot4"})
_CDNA = _GCN | {"mfma", "mfma.f16", "mfma.bf16", "mfma.int8", "mfma.f64", "load_lds"}
_RDNA2 = frozenset({"wave32", "dot2", "sdot4"})
_RDNA3 = frozenset(
    {"wave32", "dot2", "dot2.bf16", "sudot4", "wmma", "wmma.f16", "wmma.bf16", "wmma.int8", "wmma.int4"}
)
_RDNA4 = _RDNA3 | {"wmma.fp8", "fp8.ocp"}
_GFX1250 = frozenset(
    {
        "wave32",
        "sudot4",
        "wmma",
        "wmma.f16",
        "wmma.bf16",
        "wmma.int8",
        "wmma.fp8",
        "wmma.scale",
        "wmma.mxf8",
        "wmma.mxf4",
    }
    | {"fp8.ocp", "bf16.native", "tdm"}
)


def _gfx(number: str, title: str, features: frozenset[str], lds_kib: int) -> ArchFacts:
    name = f"gfx{number}"
    wave = 64 if "wave64" in features else 32
    return ArchFacts(name, "amd", name, features, title, lds_kib * _KIB, None, None, None, wave)


ARCHES: tuple[ArchFacts, ...] = (
    _gfx("906", "Vega 20 (MI50, MI60)", _GCN, 64),
    _gfx("90a", "CDNA 2 (MI200)", _CDNA, 64),
    _gfx("942", "CDNA 3 (MI300)", _CDNA | {"mfma.xf32", "mfma.fp8", "fp8.fnuz"}, 64),
    _gfx(
        "950",
        "CDNA 4 (MI350)",
        _CDNA
        | {
            "mfma.fp8",
            "mfma.scale",
            "mfma.mxf8",
            "mfma.mxf4",
            "fp8.ocp",
            "bf16.native",
            "dot2.bf16",
            "load_lds.b128",
        },
        160,
    ),
    _gfx("1030", "RDNA 2 (RX 6000)", _RDNA2, 64),
    _gfx("1100", "RDNA 3 (RX 7900)", _RDNA3, 64),
    _gfx("1101", "RDNA 3 (RX 7800)", _RDNA3, 64),
    _gfx("1102", "RDNA 3 (RX 7600)", _RDNA3, 64),
    _gfx("1150", "RDNA 3.5 (Strix Point)", _RDNA3, 64),
    _gfx("1151", "RDNA 3.5 (Strix Halo)", _RDNA3, 64),
    _gfx("1200", "RDNA 4 (RX 9060)", _RDNA4, 64),
    _gfx("1201", "RDNA 4 (RX 9070)", _RDNA4, 64),
    _gfx("1250", "gfx1250", _GFX1250, 320),
)

NO_TRITON = frozenset({"gfx1030"})
"""Architectures that Triton's AMD backend refuses ("unsupported target"), tried with Triton 3.9."""

# LLVM's generic code objects: one code object that loads on each of these.
GENERIC: dict[str, frozenset[str]] = {
    "gfx9-generic": frozenset({"gfx906"}),
    "gfx9-4-generic": frozenset({"gfx942", "gfx950"}),
    "gfx10-3-generic": frozenset({"gfx1030"}),
    "gfx11-generic": frozenset({"gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151"}),
    "gfx12-generic": frozenset({"gfx1200", "gfx1201"}),
}


def why_not(arch: str, code: str) -> str | None:
    """None when a code object for `code` (gfx name, or generic name) loads on `arch`, else why not."""
    if code in GENERIC:
        return None if arch in GENERIC[code] else f"{code} code does not run on {arch}"
    if not code.startswith("gfx"):
        raise ValueError(f"{code!r} is no AMD code name; expected gfx942 or one of {', '.join(GENERIC)}")
    return (
        None
        if code.split(":")[0] == arch
        else f"{code} code runs only on {code.split(':')[0]}, not on {arch}"
    )
