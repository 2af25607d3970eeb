"""Build: what this installation can compile or load, as data. Probed lazily and without heavy imports.

It has packages and what their modules really offer (``"module:attr"``, found by reading their source, because a package name proves
nothing), compiled CPU levels and CUDA architectures (from ``_lib/manifest.json``), and Triton's backends. `Build.key` identifies the toolchain of
a measurement or verification.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.targets import ARCHES

_DIST = re.compile(r"(?P<name>[A-Za-z0-9_.]+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")

_NAMES = (
    "cpu_levels",
    "cuda_archs",
    "hip_archs",
    "triton_backends",
    "left_out",
)  # fields of Build that list names


@cache
def normal_name(name: str) -> str:
    """The index's spelling of a distribution's name: `Flash_Infer.Python` -> `flash-infer-python`."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def version_key(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0, 0); a pre-release ranks under its release. Raises ValueError without a leading
    digit."""
    public = version.partition("+")[0]
    match = re.match(r"v?(\d+(?:\.\d+)*)(.*)", public)
    if match is None:
        raise ValueError(f"{version!r} is no version number")
    numbers = tuple(int(n) for n in match[1].split("."))
    early = bool(re.match(r"[-_.]?(a|b|c|rc|alpha|beta|dev|pre)", match[2]))
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers = numbers[:-1]
    return (*numbers, -1) if early else (*numbers, 0)


def _at_least(installed_version: str, minimum: str) -> bool:
    try:
        return version_key(installed_version) >= version_key(minimum)
    except ValueError:  # an installed package may call its version anything
        return False


@dataclass(frozen=True)
class Build:
    """An installation.

    Attributes:
        packages: (distribution, version) of everything that is installed.
        offers, lacks: `"module:attr"` confirmed, and (offer, why not).
        cpu_levels, cuda_archs, hip_archs: what the native libraries hold (`avx512`, `sm_90a`, `gfx942`).
        compilers: (name, path).
        triton_backends: `cuda`, `hip`, `xpu`.
        triton_interpreter: Triton kernels run on the CPU (TRITON_INTERPRET=1).
        machine: the CPU family that the C++ was compiled for (`x86-64`, `aarch64`, `s390x`); "" = derived from `cpu_levels`.
        library, driver: versions of the native libraries and of the GPU's driver, "" = unknown or none.
        left_out: native sources, by file name without suffix, and architectures (`compute_89`) that were not compiled (GRISTMILL_RARE=off).
    """

    packages: tuple[tuple[str, str], ...] = ()
    offers: frozenset[str] = frozenset()
    lacks: tuple[tuple[str, str], ...] = ()
    cpu_levels: tuple[str, ...] = ()
    cuda_archs: tuple[str, ...] = ()
    hip_archs: tuple[str, ...] = ()
    compilers: tuple[tuple[str, str], ...] = ()
    triton_backends: tuple[str, ...] = ()
    triton_interpreter: bool = False
    python: str = ""
    machine: str = ""
    library: str = ""
    driver: str = ""
    left_out: tuple[str, ...] = ()

    @classmethod
    def none(cls) -> Build:
        """Nothing installed, nothing compiled."""
        return cls()

    @classmethod
    def of(cls, packages: Mapping[str, str] | None = None, **other_fields: Any) -> Build:
        """A hand-written Build: `Build.of({"torch": "2.13.0", "triton": "3.9.0"}, triton_backends=("cuda",))`."""
        named = {normal_name(name): version for name, version in (packages or {}).items()}
        return cls(packages=tuple(sorted(named.items())), **other_fields)

    @classmethod
    def probe(cls) -> Build:
        """This process's installation. Cached; imports neither torch nor triton, starts no device."""
        return _probe()

    def version(self, package: str) -> str | None:
        """The installed version of a distribution, or None."""
        return self._versions.get(normal_name(package))

    @cached_property
    def _versions(self) -> dict[str, str]:
        return dict(self.packages)

    @property
    def torch(self) -> str | None:
        return self.version("torch")

    @property
    def triton(self) -> str | None:
        return self.version("triton")

    def confirm(self, offers: Iterable[str], importing: bool = False) -> Build:
        """A copy that knows which of `offers` (`"module:attr"`) exist. Reads sources; imports only with
        `importing`."""
        from gristmill.kernel_registry.offers import find_offer

        present, absent = set(self.offers), dict(self.lacks)
        for offer in offers:
            if offer in present or (offer in absent and not importing):
                continue
            offered, why = find_offer(offer, importing)
            if offered:
                present.add(offer)
                absent.pop(offer, None)
            else:
                absent[offer] = why
        return replace(self, offers=frozenset(present), lacks=tuple(sorted(absent.items())))

    def why_not_package(self, name: str, minimum: str) -> str | None:
        """None when the package is installed at `minimum` ("" = any) or newer, else why not."""
        installed_version = self.version(name)
        if installed_version is None:
            return f"package {name} is not installed"
        if minimum and not _at_least(installed_version, minimum):
            return f"package {name} is {installed_version}; {minimum} or newer is needed"
        return None

    def why_not_offer(self, offer: str) -> str | None:
        """None when `"module:attr"` was confirmed, else why not."""
        if offer in self.offers:
            return None
        return dict(self.lacks).get(offer, f"{offer} was not looked for (Build.confirm)")

    def why_not_sources(self, sources: Iterable[str]) -> str | None:
        """None when none of these native sources was left out of the build, else which were."""
        absent = [source for source in sources if source in self.left_out]
        return (
            f"not in this build: {', '.join(absent)} (rare; GRISTMILL_RARE=on builds them)"
            if absent
            else None
        )

    def why_not_triton(self, target: Target) -> str | None:
        """None when the installed Triton emits code for `target` (or interprets it), else why not."""
        if why := self.why_not_package("triton", ""):
            return why
        if self.triton_interpreter:
            return None
        emitted = target.triton_target
        if emitted is None:
            return f"Triton emits no code for {target.name}"
        if emitted[0] not in self.triton_backends:
            backends = ", ".join(self.triton_backends) or "none"
            return f"Triton {self.triton} has no backend {emitted[0]} for {target.name}; it has {backends}"
        return None

    @property
    def cpu_family(self) -> str:
        """The CPU family of the compiled C++: `machine`, else the family of a level that belongs to one; "" = unknown."""
        named = (ARCHES[f"cpu:{level}"].arch for level in self.cpu_levels if f"cpu:{level}" in ARCHES)
        return self.machine or next((arch for arch in named if arch != "any"), "")

    def cpu_level(self, target: Target) -> str | None:
        """The best compiled level that `target` runs, `cpu:avx2`; None without one. `base` is code of one family too."""
        compiled = {f"cpu:{level}" for level in self.cpu_levels}
        family = self.cpu_family
        for level in target.levels:
            stranger = level == "cpu:base" and target.arch != "any" and family not in ("", target.arch)
            if level in compiled and not stranger:
                return level
        return None

    def key(self) -> str:
        """The toolchain as one line: what a measurement or verification depends on besides the device."""
        parts = [("py", ".".join(self.python.split(".")[:2])), ("torch", self.torch), ("triton", self.triton)]
        parts += [("lib", self.library), ("driver", self.driver)]
        line = ",".join(f"{name}={value}" for name, value in parts if value)
        return (line or "none") + (",interpreter" if self.triton_interpreter else "")

    def to_json(self) -> dict[str, Any]:
        """A dict that json takes; `from_json` gives an equal Build back."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for pairs in ("packages", "lacks", "compilers"):
            out[pairs] = dict(out[pairs])
        out["offers"] = sorted(self.offers)
        for names in _NAMES:
            out[names] = list(out[names])
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Build:
        """The Build that `to_json` wrote. Raises ValueError for unknown keys."""
        strange = data.keys() - {f.name for f in fields(cls)}
        if strange:
            raise ValueError(f"build in JSON: unknown keys {sorted(strange)}")
        out = dict(data)
        for pairs in ("packages", "lacks", "compilers"):
            out[pairs] = tuple(sorted(dict(out.get(pairs, {})).items()))
        out["offers"] = frozenset(out.get("offers", ()))
        for names in _NAMES:
            out[names] = tuple(out.get(names, ()))
        return cls(**out)


def installed(path: Iterable[str] | None = None) -> dict[str, str]:
    """Distribution -> version, by the names of the metadata folders on `path` (default sys.path); the first one
    wins."""
    versions: dict[str, str] = {}
    for entry in sys.path if path is None else path:
        if not os.path.isdir(entry or "."):
            continue
        for name in sorted(os.listdir(entry or ".")):
            match = _DIST.fullmatch(name)
            if match:
                versions.setdefault(normal_name(match["name"]), match["version"])
    return versions


def read_manifest(folder: Path) -> dict[str, Any]:
    """`manifest.json` of the native libraries in `folder`; {} without one. Raises ValueError when it is broken."""
    path = folder / "manifest.json"
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); build gristmill again") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}; expected an object; build gristmill again")
    return loaded


def triton_backends() -> tuple[str, ...]:
    """The backends in the installed triton, by its folders."""
    import importlib.util

    spec = importlib.util.find_spec("triton")
    names = {"nvidia": "cuda", "amd": "hip", "intel": "xpu"}
    folders = [Path(p) / "backends" for p in (spec.submodule_search_locations or ())] if spec else []
    return tuple(
        names[name] for name in names if any((folder / name / "compiler.py").is_file() for folder in folders)
    )


@cache
def _probe() -> Build:
    import shutil

    import gristmill
    from gristmill.kernel_registry.targets.probe import FAMILIES, driver_version

    manifest: dict[str, Any] = read_manifest(Path(next(iter(gristmill.__path__))) / "_lib")
    compilers = {name: path for name in ("nvcc", "ptxas", "hipcc", "c++") if (path := shutil.which(name))}
    return Build.of(
        installed(),
        cpu_levels=tuple(manifest.get("cpu_levels", ())),
        cuda_archs=tuple(sorted(manifest.get("cuda", {}))),
        hip_archs=tuple(sorted(manifest.get("hip", {}))),
        compilers=tuple(sorted(compilers.items())),
        triton_backends=triton_backends(),
        triton_interpreter=os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y"),
        python=".".join(str(n) for n in sys.version_info[:3]),
        machine=FAMILIES.get(str(manifest.get("processor", "")).lower(), ""),
        library=str(manifest.get("version", "")),
        driver=driver_version(),
        left_out=tuple(manifest.get("left_out", ())),
    )
