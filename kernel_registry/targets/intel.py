"""Intel GPU architectures by the names of Intel's ahead-of-time compiler (pvc, bmg ...)."""

from __future__ import annotations

from .facts import ArchFacts

_KIB = 1024

_XMX = frozenset({"dpas", "dpas.f16", "dpas.bf16", "dpas.int8", "subgroup16", "subgroup32", "bf16.native"})
_XE_HPC = _XMX | {"dpas.tf32", "block2d"}


def _xpu(code: str, title: str, features: frozenset[str], slm_kib: int) -> ArchFacts:
    return ArchFacts(f"xpu:{code}", "intel", code, features, title, slm_kib * _KIB, None, None, None, 16)


ARCHES: tuple[ArchFacts, ...] = (
    _xpu("dg2", "Xe-HPG (Arc A)", _XMX, 64),
    _xpu("pvc", "Xe-HPC (Data Center GPU Max)", _XE_HPC, 128),
    _xpu("bmg", "Xe2 (Arc B)", _XE_HPC, 128),
    _xpu("lnl", "Xe2 (Lunar Lake)", _XE_HPC, 128),
)


def why_not(arch: str, code: str) -> str | None:
    """None when native code for `code` runs on `arch`, else why not. SPIR-V ("spirv") runs on any."""
    return None if code in (arch, "spirv") else f"{code} code runs only on {code}, not on {arch}"
