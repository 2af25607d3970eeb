"""Requirement: what a kernel needs of the device and of the installation. Checks return reasons, never a bare False."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from gristmill.kernel_registry.build import Build, version_key
from gristmill.kernel_registry.offers import OR
from gristmill.kernel_registry.target import Target, why_not_code
from gristmill.kernel_registry.targets import VENDORS
from gristmill.kernel_registry.targets.plugged import all_vendors

CODES = ("python", "torch", "triton", "cpp", "cuda", "hip", "cutedsl")


@dataclass(frozen=True)
class Requirement:
    """Requirements of one kernel; all of them must hold.

    Attributes:
        features: alternative sets: the target must have all features of at least one of them; () = no requirement.
        vendors: `nvidia amd intel cpu`, or those of plugins; () = any.
        packages: (distribution name, minimal version or "") pairs.
        offers: `"module:attr"` names that the installed modules must have, or one of `"a:x or b:y"`: the name of a distribution proves nothing.
        origin: where to get the module of `offers`, for libraries that no package index has under their name; part of the reason.
        brings: device code (`sm_90a`, `sm_100f`) that a wrapped library contains; one of them must run on the target. () = any.
        code: what must be emitted or loaded: `python`, `torch` (torch's own kernels), `triton`, `cpp` (any compiled CPU level that the
            target runs) or `cpp:avx512`, `cuda` (any compiled architecture that loads) or `cuda:sm_90a`, `hip` or `hip:gfx942` likewise,
            `cutedsl:sm_90a` (compiled at run time by CuTe DSL for a device that runs code of this name).
        loads: architectures of the native libraries (`compute_89`) whose code a launch runs beside `code`.
    """

    features: tuple[frozenset[str], ...] = ()
    vendors: tuple[str, ...] = ()
    packages: tuple[tuple[str, str], ...] = ()
    offers: tuple[str, ...] = ()
    code: str = "python"
    brings: tuple[str, ...] = ()
    origin: str = ""
    loads: tuple[str, ...] = ()
    _kind: str = field(init=False, repr=False, compare=False, default="")
    _arch: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if any(isinstance(s, str) for s in self.features):
            raise TypeError(
                f"features {self.features!r}: expected sets of feature names, one set for each alternative"
            )
        object.__setattr__(self, "features", tuple(frozenset(s) for s in self.features))
        for vendor in self.vendors:
            if vendor not in VENDORS and vendor not in all_vendors():
                raise ValueError(f"vendor {vendor!r} is unknown; expected one of {', '.join(all_vendors())}")
        for name, minimum in self.packages:
            if minimum:
                try:
                    version_key(minimum)
                except ValueError as error:
                    raise ValueError(f"package {name}: {error}") from None
        for offer in self.offers:
            if not all(re.fullmatch(r"[\w.]+:[\w.]+", name) for name in offer.split(OR)):
                raise ValueError(
                    f"offer {offer!r}: expected 'module:attr', or several with {OR!r} between them"
                )
        kind, _, arch = self.code.partition(":")
        if kind not in CODES or (arch and kind in ("python", "torch", "triton")):
            raise ValueError(
                f"code {self.code!r}: expected one of {', '.join(CODES)}, the last four with ':arch'"
            )
        if kind == "cutedsl" and not arch:
            raise ValueError(f"code {self.code!r}: name the architecture, e.g. cutedsl:sm_90a")
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_arch", arch)

    @classmethod
    def any(
        cls,
        *sets: Iterable[str],
        vendors: tuple[str, ...] = (),
        packages: tuple[tuple[str, str], ...] = (),
        offers: tuple[str, ...] = (),
        code: str = "python",
        brings: tuple[str, ...] = (),
        origin: str = "",
    ) -> Requirement:
        """A Requirement met by any of the feature sets: `Requirement.any({"wgmma", "tma"}, {"mfma"})`."""
        for features in sets:
            if isinstance(features, str):
                raise TypeError(
                    f"{features!r} is a string; expected a set of feature names for each alternative"
                )
        return cls(tuple(frozenset(s) for s in sets), vendors, packages, offers, code, brings, origin)

    def check_hardware(self, target: Target, build: Build | None = None) -> tuple[str, ...]:
        """Why this device cannot run the kernel, whatever is installed; () = it can.

        `build` matters in one case: with Triton's interpreter on, Triton kernels run on a CPU.
        """
        reasons: list[str] = []
        if self.vendors and target.vendor not in self.vendors:
            reasons.append(f"runs on {', '.join(self.vendors)}; {target.name} is {target.vendor}")
        interpreted = self._kind == "triton" and build is not None and build.triton_interpreter
        if self.features and not interpreted and not any(s <= target.features for s in self.features):
            needed = " or ".join("{" + ", ".join(sorted(s)) + "}" for s in self.features)
            lacking = sorted(frozenset().union(*(s - target.features for s in self.features)))
            one = "" if len(self.features) == 1 else "one of "
            reasons.append(f"needs {one}{needed}; {target.name} lacks {', '.join(lacking)}")
        if reasons:
            return tuple(reasons)
        if self.brings and all(why_not_code(target, code) for code in self.brings):
            reasons.append(
                f"the library has code for {', '.join(self.brings)}; none of it runs on {target.name}"
            )
        if self._kind == "triton" and target.triton_target is None and not interpreted:
            remedy = " (its interpreter is off: TRITON_INTERPRET=1)" if target.vendor == "cpu" else ""
            reasons.append(f"Triton emits no code for {target.name}{remedy}")
        elif self._kind == "cpp" and target.vendor != "cpu":
            reasons.append(f"C++ code for CPUs; {target.name} is {target.vendor}")
        elif self._kind == "cuda" and target.vendor != "nvidia":
            reasons.append(f"CUDA code; {target.name} is {target.vendor}")
        elif self._kind == "hip" and not self._arch and target.vendor != "amd":
            reasons.append(f"HIP code; {target.name} is {target.vendor}")
        elif self._arch and (why := why_not_code(target, self._code_name())):
            reasons.append(why)
        return tuple(reasons)

    def check_build(self, target: Target, build: Build) -> tuple[str, ...]:
        """Why this installation cannot emit or load the kernel for the device; () = it can."""
        reasons: list[str] = []
        for name, minimum in self.packages:
            if why := build.why_not_package(name, minimum):
                reasons.append(why)
        if not reasons:
            whys = [why for offer in self.offers if (why := build.why_not_offer(offer))]
            reasons += [f"{why}; it comes from {self.origin}" if self.origin else why for why in whys]
        if (
            self._kind == "torch"
            and (why := build.why_not_package("torch", ""))
            or self._kind == "triton"
            and (why := build.why_not_triton(target))
        ):
            reasons.append(why)
        elif self._kind == "cpp":
            reasons += self._compiled(
                target, [f"cpu:{level}" for level in build.cpu_levels], "C++ level", build
            )
        elif self._kind == "cuda":
            reasons += self._compiled(target, list(build.cuda_archs), "CUDA architecture", build)
        elif self._kind == "hip":
            reasons += self._compiled(target, list(build.hip_archs), "HIP architecture", build)
        elif self._kind == "cutedsl" and (why := build.why_not_package("nvidia-cutlass-dsl", "")):
            reasons.append(why)
        for code in self.loads:
            reasons += _lacks(code, list(build.cuda_archs), build)
        return tuple(dict.fromkeys(reasons))

    def _code_name(self) -> str:
        return f"cpu:{self._arch}" if self._kind == "cpp" else self._arch

    def _compiled(self, target: Target, available: list[str], kind: str, build: Build) -> list[str]:
        if self._arch:
            return _lacks(self._code_name(), available, build)
        if target.vendor == "cpu":
            runs = build.cpu_level(target) is not None
        else:
            runs = any(why_not_code(target, code) is None for code in available)
        if runs:
            return []
        return [
            f"this build has no {kind} that runs on {target.name}; it has {', '.join(available) or 'none'}"
        ]


def _lacks(code: str, available: list[str], build: Build) -> list[str]:
    """Why a build, whose libraries have code for `available`, has none for `code`; [] if it has."""
    if code in available:
        return []
    if why := build.why_not_sources((code,)):
        return [why]
    return [f"this build has no code for {code}; it has {', '.join(available) or 'none'}"]
