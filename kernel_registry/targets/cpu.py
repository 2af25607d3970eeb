"""CPU levels: what our C++ is compiled for. A level holds every feature of the levels below it, so a CPU that can run
one can run those; a CPU with some later feature but not an earlier one (AVX512 without VNNI) gets the level that it has
whole."""

from __future__ import annotations

from .facts import ArchFacts

_CHAINS: dict[str, tuple[tuple[str, str, frozenset[str]], ...]] = {
    "x86-64": (
        ("avx2", "AVX2, FMA, F16C", frozenset({"avx2", "fma", "f16c"})),
        ("avx512", "AVX-512 F, BW, VL, DQ", frozenset({"avx512"})),
        ("avx512_vnni", "AVX-512 with VNNI", frozenset({"avx512_vnni"})),
        ("avx512_bf16", "AVX-512 with VNNI and BF16", frozenset({"avx512_bf16", "bf16.native"})),
        ("amx", "AMX int8 and bf16", frozenset({"amx", "amx_int8", "amx_bf16"})),
    ),
    "aarch64": (
        ("neon", "Advanced SIMD", frozenset({"neon"})),
        ("neon_dotprod", "Advanced SIMD with dot products", frozenset({"neon_dotprod"})),
        ("neon_i8mm", "Advanced SIMD with int8 matrix multiply", frozenset({"neon_i8mm"})),
        ("sve", "SVE, with dot products and int8 matrix multiply", frozenset({"sve"})),
    ),
    "s390x": (("vxe", "vector enhancements (z14)", frozenset({"vx", "vxe"})),),
}


def _tables() -> tuple[ArchFacts, ...]:
    arches = [ArchFacts("cpu:base", "cpu", "any", frozenset(), "any CPU, plain C++")]
    for arch, chain in _CHAINS.items():
        features: frozenset[str] = frozenset()
        for level, title, added in chain:
            features |= added
            arches.append(ArchFacts(f"cpu:{level}", "cpu", arch, features, title))
    return tuple(arches)


ARCHES: tuple[ArchFacts, ...] = _tables()


def levels(arch: str, features: frozenset[str]) -> tuple[str, ...]:
    """Names of the levels that a CPU of `arch` (`x86-64`, `aarch64`, `s390x`, other) with `features` runs, best first.

    Always ends in `cpu:base`.
    """
    return tuple(f.name for f in reversed(ARCHES) if f.arch in (arch, "any") and f.features <= features)


def why_not(arch: str, features: frozenset[str], code: str) -> str | None:
    """None when C++ compiled for level `code` (`cpu:avx512` or `avx512`) runs on such a CPU, else why not."""
    name = code if code.startswith("cpu:") else f"cpu:{code}"
    for facts in ARCHES:
        if facts.name == name:
            if facts.arch not in (arch, "any"):
                return f"{name} is a level of {facts.arch}; this CPU is {arch}"
            lacking = facts.features - features
            return f"{name} needs {', '.join(sorted(lacking))}, which this CPU lacks" if lacking else None
    raise ValueError(f"{code!r} is no CPU level; expected one of {', '.join(f.name for f in ARCHES)}")
