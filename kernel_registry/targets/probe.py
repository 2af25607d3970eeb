"""Detection of the devices of this machine. Reads /proc and /sys and calls libcuda through ctypes; no context, no torch.

A missing driver is a reason in the result, never an exception. Folders are arguments so that tests can pass their own.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.kernel_registry.target import Target, for_device_name
from gristmill.kernel_registry.targets import ARCHES, cpu
from gristmill.kernel_registry.targets.plugged import plugged

_X86_FLAGS = {
    "avx2": {"avx2"},
    "fma": {"fma"},
    "f16c": {"f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16"},
    "avx512_fp16": {"avx512_fp16"},
    "bf16.native": {"avx512_bf16"},
    "avx_vnni": {"avx_vnni"},
    "amx": {"amx_tile"},
    "amx_int8": {"amx_tile", "amx_int8"},
    "amx_bf16": {"amx_tile", "amx_bf16"},
}
_ARM_FLAGS = {
    "neon": {"asimd"},
    "neon_dotprod": {"asimddp"},
    "neon_i8mm": {"i8mm"},
    "neon_bf16": {"bf16"},
    "neon_fp16": {"asimdhp"},
    "sve": {"sve"},
    "sve2": {"sve2"},
    "bf16.native": {"bf16"},
}
_S390_FLAGS = {"vx": {"vx"}, "vxe": {"vxe"}}
FAMILIES = {"x86_64": "x86-64", "amd64": "x86-64", "arm64": "aarch64", "aarch64": "aarch64", "s390x": "s390x"}


@dataclass(frozen=True)
class Probe:
    """The devices in the driver's order, so that the index is the device index of its vendor; and why some are missing."""

    targets: tuple[Target, ...] = ()
    reasons: tuple[str, ...] = ()


def probe_cpu(root: str | Path = "/", machine: str | None = None) -> Target:
    """The CPU of this process: its best level, all features, usable threads, last-level cache and memory.

    Without /proc/cpuinfo the level is `cpu:base` (`cpu:neon` on arm64, where Advanced SIMD is part of the
    architecture).
    """
    folder = Path(root)
    family = FAMILIES.get(
        (machine or platform.machine()).lower(), (machine or platform.machine()).lower() or "any"
    )
    text = _read(folder / "proc/cpuinfo")
    flags, title = _cpuinfo(text)
    table = {"x86-64": _X86_FLAGS, "aarch64": _ARM_FLAGS, "s390x": _S390_FLAGS}.get(family, {})
    features = frozenset(name for name, needed in table.items() if needed <= flags)
    if family == "aarch64" and not flags:
        features = frozenset({"neon"})
    best = cpu.levels(family, features)[0]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if Path(root) != Path("/"):
        usable = len(re.findall(r"^processor\s*[:\d]", text, re.MULTILINE)) or 1
    return Target(
        best,
        "cpu",
        family,
        features | ARCHES[best].features,
        multiprocessors=usable,
        l2_bytes=_last_cache(folder),
        memory_bytes=_memory(folder),
        device=title,
    )


def probe_devices() -> Probe:
    """Every GPU here: NVIDIA through libcuda, AMD and Intel through /sys; then the devices that plugins find."""
    parts = [probe_cuda(), probe_amd(), probe_intel(), probe_plugged()]
    return Probe(tuple(t for p in parts for t in p.targets), tuple(r for p in parts for r in p.reasons))


def probe_cuda(library: Any = None) -> Probe:
    """NVIDIA devices by the driver API (cuInit, cuDeviceGet...: no context). `library` stands in for libcuda in
    tests."""
    import ctypes

    cuda, why = (library, "") if library is not None else _libcuda()
    if cuda is None:
        return Probe(reasons=(why,))
    count = ctypes.c_int(0)
    for call, status in (
        ("cuInit", cuda.cuInit(0)),
        ("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count))),
    ):
        if status:
            return Probe(reasons=(f"{call} failed with CUDA error {status}",))
    if count.value == 0:
        return Probe(reasons=("the NVIDIA driver lists no device",))
    targets: list[Target] = []
    reasons: list[str] = []
    for index in range(count.value):
        device = _cuda_device(cuda, index)
        if isinstance(device, Target):
            targets.append(device)
        else:
            reasons.append(device)
    return Probe(tuple(targets), tuple(reasons))


def _cuda_device(cuda: Any, index: int) -> Target | str:
    import ctypes

    handle, name, memory = ctypes.c_int(0), ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    if status := cuda.cuDeviceGet(ctypes.byref(handle), index):
        return f"cuDeviceGet({index}) failed with CUDA error {status}"

    def attribute(number: int) -> int | None:
        value = ctypes.c_int(0)
        return None if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle) else value.value

    major, minor = attribute(75), attribute(76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
    if major is None or minor is None:
        return f"CUDA device {index} does not report its compute capability"
    try:
        target = Target.parse(f"sm_{major}{minor}")
    except ValueError:
        return f"CUDA device {index} is sm_{major}{minor}, which is not in the table of targets"
    sizes = {"multiprocessors": attribute(16), "l2_bytes": attribute(38), "smem_bytes": attribute(97)}
    sizes |= {"smem_per_multiprocessor": attribute(81), "registers": attribute(82)}
    if not cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle):
        sizes["memory_bytes"] = memory.value
    counts: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    target = replace(target, **counts)
    if cuda.cuDeviceGetName(name, len(name), handle):
        return target
    return for_device_name(target, name.value.decode("utf-8", "replace"))


def driver_version(root: str | Path = "/") -> str:
    """The NVIDIA kernel driver's version (`580.65.06`), else amdgpu's, else ""."""
    nvidia = re.search(r"(\d+\.\d+(?:\.\d+)?)", _read(Path(root) / "proc/driver/nvidia/version"))
    return nvidia[1] if nvidia else _read(Path(root) / "sys/module/amdgpu/version").strip()


def probe_amd(root: str | Path = "/") -> Probe:
    """AMD GPUs by the topology of the kfd driver; `gfx_target_version` 90402 is gfx942, 110000 is gfx1100."""
    nodes = Path(root) / "sys/class/kfd/kfd/topology/nodes"
    if not nodes.is_dir():
        return Probe(reasons=("no AMD compute driver (kfd) here",))
    targets: list[Target] = []
    reasons: list[str] = []
    for node in sorted((p for p in nodes.iterdir() if p.name.isdigit()), key=lambda p: int(p.name)):
        values = dict(re.findall(r"^(\w+)\s+(\d+)\s*$", _read(node / "properties"), re.MULTILINE))
        version = int(values.get("gfx_target_version", 0))
        if not version:  # a CPU node
            continue
        gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        if gfx not in ARCHES:
            reasons.append(f"AMD device {node.name} is {gfx}, which is not in the table of targets")
            continue
        simds, per_cu = int(values.get("simd_count", 0)), int(values.get("simd_per_cu", 0))
        banks = [
            dict(re.findall(r"^(\w+)\s+(\d+)\s*$", _read(p), re.MULTILINE))
            for p in node.glob("mem_banks/*/properties")
        ]
        memory = sum(int(b.get("size_in_bytes", 0)) for b in banks if b.get("heap_type") in ("1", "2"))
        target = replace(
            Target.parse(gfx),
            multiprocessors=simds // per_cu if simds and per_cu else None,
            memory_bytes=memory or None,
        )
        name = _read(node / "name").strip()
        targets.append(for_device_name(target, name) if name else target)
    return Probe(tuple(targets), tuple(reasons or (() if targets else ("kfd lists no AMD GPU",))))


# The first two hexadecimal digits of a PCI id determine the family, from Intel's list of device ids.
_INTEL_FAMILIES = {"0x56": "dg2", "0x4f": "dg2", "0x0b": "pvc", "0xe2": "bmg", "0x64": "lnl"}


def probe_intel(root: str | Path = "/") -> Probe:
    """Intel GPUs by the PCI id of each DRM card."""
    targets: list[Target] = []
    reasons: list[str] = []
    for card in sorted((Path(root) / "sys/class/drm").glob("card*/device")):
        if "-" in card.parent.name or _read(card / "vendor").strip() != "0x8086":
            continue
        device = _read(card / "device").strip().lower()
        if device[:4] in _INTEL_FAMILIES:
            targets.append(Target.parse(f"xpu:{_INTEL_FAMILIES[device[:4]]}"))
        else:
            reasons.append(f"Intel device {device} ({card.parent.name}) is not in the table of targets")
    return Probe(tuple(targets), tuple(reasons or (() if targets else ("no Intel GPU here",))))


def probe_plugged() -> Probe:
    """Devices of the vendors that plugins declare. What a probe raises is its reason."""
    targets: list[Target] = []
    reasons: list[str] = []
    for vendor in plugged().vendors.values():
        try:
            targets += [_of(vendor.name, found) for found in vendor.probe()]
        except Exception as error:
            reasons.append(f"no {vendor.name} device here ({type(error).__name__}: {error})")
    return Probe(tuple(targets), tuple(reasons))


def _of(vendor: str, found: object) -> Target:
    if isinstance(found, Target) and found.vendor == vendor:
        return found
    raise TypeError(f"expected targets of {vendor}, got {found!r}")


def _libcuda() -> tuple[Any, str]:
    import ctypes

    why = ""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name), ""
        except OSError as error:
            why = why or str(error)
    return None, f"no NVIDIA driver here ({why})"


def _cpuinfo(text: str) -> tuple[set[str], str]:
    fields: dict[str, str] = {}
    for key, value in re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text, re.MULTILINE):
        fields.setdefault(key.strip().lower(), value)
    flags = fields.get("flags") or fields.get("features") or ""
    return set(flags.split()), fields.get("model name", "").strip()


def _last_cache(root: Path) -> int | None:
    best: tuple[int, int] | None = None
    for index in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size = _read(index / "level").strip(), _read(index / "size").strip()
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if level.isdigit() and match and _read(index / "type").strip() != "Instruction":
            best = max(
                best or (0, 0), (int(level), int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
            )
    return best[1] if best else None


def _memory(root: Path) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _read(path: Path) -> str:
    """The text of a file of /proc or /sys; "" if it is absent or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
