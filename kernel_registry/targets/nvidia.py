"""NVIDIA architectures: features from the PTX ISA and the CUDA programming guide, and which device code runs where.

Two traps this table exists for. A larger number is no superset: sm_110 and sm_120 cannot run sm_100 code, sm_120 has
neither wgmma nor tcgen05, and nothing after sm_90 has wgmma. And mma.sync on int4 is gone from the hardware after
sm_89.
"""

from __future__ import annotations

import re

from .facts import ArchFacts

_KIB = 1024

_VOLTA = frozenset({"mma.f16", "dp4a"})
_TURING = _VOLTA | {"mma.int8", "mma.int4", "ldmatrix"}
_AMPERE = _TURING | {"mma.bf16", "mma.tf32", "cp_async", "mbarrier", "bf16.native"}
_ADA = _AMPERE | {"mma.fp8", "fp8.ocp"}
_NINE = (_ADA - {"mma.int4"}) | {"stmatrix", "tma", "clusters", "setmaxnreg", "pdl"}
_HOPPER = _NINE | {"mma.f64", "tma.multicast", "wgmma"}
_BLOCK_SCALED = frozenset({"mma.block_scale", "mma.mxf8", "mma.mxf4", "mma.nvf4", "cvt.fp4"})
_TCGEN05 = _NINE | _BLOCK_SCALED | {"tma.multicast", "tcgen05"}
_CONSUMER_BLACKWELL = _NINE | _BLOCK_SCALED | {"mma.sync.block_scale"}


def _sm(number: int, title: str, features: frozenset[str], block_kib: int, sm_kib: int) -> ArchFacts:
    name = f"sm_{number}"
    return ArchFacts(name, "nvidia", name, features, title, block_kib * _KIB, sm_kib * _KIB, 65536, 255, 32)


ARCHES: tuple[ArchFacts, ...] = (
    _sm(70, "Volta", _VOLTA, 96, 96),
    _sm(75, "Turing", _TURING, 64, 64),
    _sm(80, "Ampere, data centre", _AMPERE | {"mma.f64"}, 163, 164),
    _sm(86, "Ampere", _AMPERE, 99, 100),
    _sm(87, "Ampere, Jetson Orin", _AMPERE, 163, 164),
    _sm(89, "Ada", _ADA, 99, 100),
    _sm(90, "Hopper", _HOPPER, 227, 228),
    _sm(100, "Blackwell, data centre", _TCGEN05 | {"mma.f64", "tcgen05.int8"}, 227, 228),
    _sm(103, "Blackwell Ultra", _TCGEN05, 227, 228),
    _sm(110, "Blackwell, Jetson Thor", _TCGEN05 | {"tcgen05.int8"}, 227, 228),
    _sm(120, "Blackwell, GeForce and RTX PRO", _CONSUMER_BLACKWELL, 99, 100),
    _sm(121, "Blackwell, GB10", _CONSUMER_BLACKWELL, 99, 100),
)

# Cubins are not shared between these and the rest of their major number.
_JETSON = frozenset({"sm_87"})

_CODE = re.compile(r"(sm|compute)_(\d{2,3})([af]?)")


def why_not(arch: str, code: str) -> str | None:
    """None when device code built for `code` runs on `arch`, else why not.

    `sm_80` is a cubin: it runs on the same major number with an equal or greater minor one
    (sm_87, a Jetson, stands alone). `sm_90a` runs on exactly
    sm_90. `sm_100f` runs on its family: the same major, an equal or greater minor. `compute_80` is PTX, compiled by
    the driver for anything equal or newer; `compute_90a` and `compute_100f` are bound like their cubins.
    """
    have, want = _CODE.fullmatch(arch), _CODE.fullmatch(code)
    if want is None:
        raise ValueError(f"{code!r} is no NVIDIA code name; expected sm_90, sm_90a, sm_100f or compute_80")
    if have is None or have[3] or have[1] != "sm":
        raise ValueError(f"{arch!r} is no NVIDIA architecture; expected sm_<number>")
    kind, suffix = want[1], want[3]
    major, minor = divmod(int(have[2]), 10)
    code_major, code_minor = divmod(int(want[2]), 10)
    if suffix == "a":
        same = (major, minor) == (code_major, code_minor)
        return None if same else f"{code} code runs only on sm_{want[2]}, not on {arch}"
    if suffix == "f":
        same = major == code_major and minor >= code_minor
        return (
            None
            if same
            else f"{code} code runs only on its family (sm_{code_major}x from sm_{want[2]}), not on {arch}"
        )
    if kind == "compute":
        newer = (major, minor) >= (code_major, code_minor)
        return None if newer else f"{code} PTX needs sm_{want[2]} or newer; {arch} is older"
    if _JETSON & {arch, f"sm_{want[2]}"}:
        return (
            None
            if arch == code
            else f"a cubin for {code} does not run on {arch}: Jetson and others do not share cubins"
        )
    if major != code_major:
        return f"a cubin for {code} runs only on sm_{code_major}x; {arch} is not binary compatible"
    return None if minor >= code_minor else f"a cubin for {code} needs sm_{want[2]} or newer; {arch} is older"
