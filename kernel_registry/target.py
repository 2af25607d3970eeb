"""Target: one device as data. Parsed from a name, probed (targets/probe.py), or written by hand for tests.

It has vendor, architecture and a *set of features*, never a number to compare: ``sm_121`` is not ``sm_120``, and neither is ``sm_100``. One
table per vendor in `targets` lists the features of each; devices of other makers come from plugins.

    >>> from gristmill.kernel_registry import Requirement, Target
    >>> hopper = Requirement.any({"wgmma", "tma"})
    >>> hopper.check_hardware(Target.parse("h200"))
    ()
    >>> hopper.check_hardware(Target.parse("sm_120"))
    ('needs {tma, wgmma}; sm_120 lacks wgmma',)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gristmill.kernel_registry.targets import ARCHES, FEATURES, VENDORS, amd, cpu, intel, nvidia
from gristmill.kernel_registry.targets.devices import ALIASES, Device, by_device_name
from gristmill.kernel_registry.targets.plugged import all_vendors, plugged

_EDIT = re.compile(r"([+-])([A-Za-z0-9_.]+)")
_INTS = (
    "multiprocessors",
    "l2_bytes",
    "memory_bytes",
    "smem_bytes",
    "smem_per_multiprocessor",
    "registers",
    "max_registers",
)


@dataclass(frozen=True)
class Target:
    """One device. Only name, vendor, arch and features are needed; None = unknown.

    Attributes:
        name: canonical, `sm_90`, `gfx942`, `cpu:avx512_bf16`, `xpu:bmg`, with edits of the features: `sm_90+foo-tma`.
        arch: `sm_90`, `gfx942`, `bmg`, `x86-64`: the architecture that device code must match.
        multiprocessors: SMs, compute units, Xe cores; for a CPU the logical processors this process may use.
        l2_bytes: the last-level cache that all of them share (L3 of a CPU).
        bandwidth_gbs: ceiling of a device-to-device copy, read plus write, 1e9 bytes per second; bandwidth_source says `datasheet`,
            `measured copy` or nothing.
        tflops: (dtype, dense TFLOP/s) pairs.
        smem_bytes: most shared memory / LDS / SLM of one block.
        wave_size: lanes of a warp, wave or sub-group; 0 for a CPU.
        device: the product's name.
    """

    name: str
    vendor: str
    arch: str
    features: frozenset[str]
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    bandwidth_gbs: float | None = None
    bandwidth_source: str = ""
    tflops: tuple[tuple[str, float], ...] = ()
    smem_bytes: int | None = None
    smem_per_multiprocessor: int | None = None
    registers: int | None = None
    max_registers: int | None = None
    wave_size: int = 0
    device: str = ""
    _levels: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if self.vendor not in VENDORS and self.vendor not in all_vendors():
            raise ValueError(
                f"target {self.name!r}: vendor {self.vendor!r}; expected one of {', '.join(all_vendors())}"
            )
        if not self.name or any(c.isspace() for c in self.name):
            raise ValueError(f"target name {self.name!r} is empty or has white space")
        object.__setattr__(self, "features", frozenset(self.features))
        for key in _INTS:
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(
                    f"target {self.name!r}: {key} is {value!r}; expected a count, or None for unknown"
                )
        if self.vendor == "cpu":
            arch = self.arch
            if arch == "any":  # a hand-written CPU: its features determine the family
                arch = next((f.arch for f in cpu.ARCHES if f.features and f.features <= self.features), arch)
            object.__setattr__(self, "_levels", cpu.levels(arch, self.features))

    @classmethod
    def parse(cls, text: str) -> Target:
        """A target from `sm_121`, `sm121`, `sm_90a`, `gfx942`, `cpu:avx2`, `xpu:bmg`, or a device (`h200`, `mi300x`),
        each optionally with edits of its features, `sm_90+foo-tma`.

        Raises ValueError for an unknown name (with similar names), for adding a feature that it has, or removing one
        that it does not have.
        """
        if not isinstance(text, str):
            raise TypeError(f"a target's name is a string, not {type(text).__name__}")
        low = text.strip()
        cut = min((low.find(c) for c in "+-" if c in low), default=len(low))
        base, edits = low[:cut].lower(), low[cut:]
        target = _base(base, text)
        if not edits:
            return target
        changes = _EDIT.findall(edits)
        if "".join(sign + name for sign, name in changes) != edits:
            raise ValueError(
                f"target {text!r}: {edits!r} is no list of edits; expected +feature or -feature, repeated"
            )
        return target.edited(
            add=[name for sign, name in changes if sign == "+"],
            remove=[name for sign, name in changes if sign == "-"],
        )

    def edited(self, add: list[str] | None = None, remove: list[str] | None = None) -> Target:
        """A copy with features added and removed, named canonically: `sm_90+foo-tma`. Same errors as `parse`."""
        plus, minus = set(add or ()), set(remove or ())
        base = self.name
        cut = min((base.find(c) for c in "+-" if c in base), default=len(base))
        for sign, name in _EDIT.findall(base[cut:]):
            (plus if sign == "+" else minus).add(name)
        for name in sorted(set(add or ()) & self.features):
            raise ValueError(f"target {self.name}: it has feature {name!r} already")
        for name in sorted(set(remove or ()) - self.features):
            near = _near(name, self.features)
            raise ValueError(f"target {self.name}: it has no feature {name!r} to remove{near}")
        both = plus & minus
        plus, minus = plus - both, minus - both
        edits = "".join(f"+{n}" for n in sorted(plus)) + "".join(f"-{n}" for n in sorted(minus))
        features = (self.features | set(add or ())) - set(remove or ())
        return replace(self, name=base[:cut] + edits, features=features)

    @property
    def base(self) -> str:
        """The name without edits."""
        return re.split(r"[+-]", self.name, maxsplit=1)[0]

    @property
    def levels(self) -> tuple[str, ...]:
        """CPU levels that this CPU runs, best first, ending in `cpu:base`; empty for a GPU."""
        return self._levels

    @property
    def triton_target(self) -> tuple[str, int | str, int] | None:
        """(backend, arch, warp size) as triton's GPUTarget takes them; None where triton has no backend (CPU, gfx1030)."""
        if self.vendor == "nvidia":
            number = re.fullmatch(r"sm_(\d+)", self.arch)
            return None if number is None else ("cuda", int(number[1]), 32)
        if self.vendor == "amd":
            return None if self.arch in amd.NO_TRITON else ("hip", self.arch, self.wave_size or 64)
        if self.vendor == "intel":  # the backend of the separate triton-xpu; its warp size is 32 by default
            return ("xpu", self.arch, 32)
        return None

    @property
    def nvcc_arch(self) -> str | None:
        """The arch-specific name that nvcc and CuTe DSL compile for (`sm_90a`, `sm_120a`), `sm_80` before sm_90."""
        if self.vendor != "nvidia":
            return None
        return self.arch + ("a" if int(self.arch[3:]) >= 90 else "")

    def peak(self, dtype: str) -> float | None:
        """Dense matrix TFLOP/s of `dtype` (`bf16`, `fp8` ...), or None when unknown."""
        return dict(self.tflops).get(dtype)

    def describe(self) -> str:
        """A description in several lines, without unknown facts."""
        facts = [f"{self.name}: {self.device or 'no particular device'} ({self.vendor}, {self.arch})"]
        line = []
        if self.multiprocessors is not None:
            line.append(f"{self.multiprocessors} {'threads' if self.vendor == 'cpu' else 'multiprocessors'}")
        if self.l2_bytes is not None:
            line.append(f"{self.l2_bytes / 2**20:.0f} MiB shared cache")
        if self.memory_bytes is not None:
            line.append(f"{self.memory_bytes / 1e9:.0f} GB memory")
        if self.bandwidth_gbs is not None:
            line.append(f"{self.bandwidth_gbs:.0f} GB/s ({self.bandwidth_source or 'source unknown'})")
        if self.smem_bytes is not None:
            line.append(f"{self.smem_bytes // 1024} KiB shared memory per block")
        if self.wave_size:
            line.append(f"{self.wave_size} lanes per wave")
        if line:
            facts.append("  " + ", ".join(line))
        if self.tflops:
            facts.append("  TFLOP/s: " + ", ".join(f"{d} {v:g}" for d, v in self.tflops))
        facts.append("  features: " + (", ".join(sorted(self.features)) or "none"))
        return "\n".join(facts)

    def to_json(self) -> dict[str, Any]:
        """A dict that json can serialize; unknown = None. `from_json` gives an equal Target back."""
        out: dict[str, Any] = {"name": self.name, "vendor": self.vendor, "arch": self.arch}
        out["features"] = sorted(self.features)
        out.update({key: getattr(self, key) for key in _INTS})
        out.update(bandwidth_gbs=self.bandwidth_gbs, bandwidth_source=self.bandwidth_source)
        out.update(tflops=dict(self.tflops), wave_size=self.wave_size, device=self.device)
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Target:
        """The Target that `to_json` wrote. Raises ValueError naming missing or unknown keys."""
        known = {"name", "vendor", "arch", "features", *_INTS, "bandwidth_gbs", "bandwidth_source", "tflops"}
        known |= {"wave_size", "device"}
        missing, unknown = {"name", "vendor", "arch", "features"} - data.keys(), data.keys() - known
        if missing or unknown:
            raise ValueError(
                f"target in JSON: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}"
            )
        fields = dict(data)
        fields["features"] = frozenset(fields["features"])
        fields["tflops"] = tuple(sorted(dict(fields.get("tflops") or {}).items()))
        return cls(**fields)

    def with_device(self, device: Device) -> Target:
        """A copy with the ceilings of a well-known product; values that this target already has are kept."""
        counts: dict[str, Any] = {
            key: getattr(device, key)
            for key in ("multiprocessors", "l2_bytes", "memory_bytes")
            if getattr(self, key) is None
        }
        if self.bandwidth_gbs is None and device.bandwidth_gbs is not None:
            counts.update(bandwidth_gbs=float(device.bandwidth_gbs), bandwidth_source=device.bandwidth_source)
        return replace(
            self, device=self.device or device.title, tflops=self.tflops or device.tflops, **counts
        )


def runs_code_of(target: Target, code: str) -> bool:
    """Whether device code built for `code` (`sm_80`, `sm_90a`, `sm_100f`, `compute_80`, `gfx942`, `gfx11-generic`,
    `cpu:avx512`) loads and runs on `target`. Raises ValueError for a name that is no code name."""
    return why_not_code(target, code) is None


def why_not_code(target: Target, code: str) -> str | None:
    """None when code built for `code` runs on `target`, else the reason. Raises ValueError as `runs_code_of`."""
    vendor = _vendor_of(code)
    if vendor != target.vendor:
        return f"{code} is code for {vendor}; {target.name} is {target.vendor}"
    if vendor == "nvidia":
        return nvidia.why_not(target.arch, code)
    if vendor == "amd":
        return amd.why_not(target.arch, code)
    if vendor == "intel":
        return intel.why_not(target.arch, code.removeprefix("xpu:"))
    level = code if code.startswith("cpu:") else f"cpu:{code}"
    if level in target.levels:
        return None
    return cpu.why_not(target.arch, target.features, level) or f"{level} does not run on {target.name}"


def for_device_name(base: Target, name: str) -> Target:
    """`base` given the driver's name of the device, and the ceilings where the product is well known."""
    named = replace(base, device=name)
    device = by_device_name(name)
    return named.with_device(device) if device is not None and device.target == base.base else named


def _vendor_of(code: str) -> str:
    if code.startswith(("sm_", "compute_")):
        return "nvidia"
    if code.startswith("gfx"):
        return "amd"
    if code.startswith("xpu:") or code == "spirv":
        return "intel"
    if code.startswith("cpu:") or f"cpu:{code}" in ARCHES:
        return "cpu"
    raise ValueError(
        f"{code!r} is no code name; expected e.g. sm_90a, sm_100f, compute_80, gfx942, xpu:bmg, cpu:avx2"
    )


def _base(base: str, text: str) -> Target:
    if base in ALIASES:
        device = ALIASES[base]
        return _from_table(device.target).with_device(device)
    sm = re.fullmatch(r"sm_?(\d+)[af]?", base)
    name = f"sm_{sm[1]}" if sm else base
    if name not in ARCHES and name not in plugged().arches:
        known = [*ARCHES, *ALIASES, *plugged().arches]
        raise ValueError(f"unknown target {text!r}{_near(base, known)}")
    return _from_table(name)


def _from_table(name: str) -> Target:
    f = ARCHES.get(name) or plugged().arches[name]
    return Target(
        f.name,
        f.vendor,
        f.arch,
        f.features,
        smem_bytes=f.smem_bytes,
        smem_per_multiprocessor=f.smem_per_multiprocessor,
        registers=f.registers,
        max_registers=f.max_registers,
        wave_size=f.wave_size,
    )


def _near(name: str, names: Any) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, sorted(names), n=4, cutoff=0.5)
    if near:
        return f"; near: {', '.join(near)}"
    return f"; known: {', '.join(sorted(names))}"


def known_targets() -> tuple[str, ...]:
    """Every canonical target name, in table order."""
    return tuple(ARCHES)


def known_devices() -> tuple[str, ...]:
    """Every device alias that `Target.parse` takes."""
    return tuple(ALIASES)


__all__ = [
    "FEATURES",
    "Target",
    "for_device_name",
    "known_devices",
    "known_targets",
    "runs_code_of",
    "why_not_code",
]
