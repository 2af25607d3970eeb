"""The Target of a torch device."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

from gristmill.kernel_registry.policy import Policy, PolicyError
from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.targets.plugged import plugged
from gristmill.kernel_registry.targets.probe import probe_cpu, probe_devices


def device_target(device: str, policy: Policy) -> Target:
    """The target of ``cpu``, ``cuda`` or ``cuda:1``; a policy may hold a CPU to a lower code level.

    ValueError if there is no such device; PolicyError if the CPU cannot run the level.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        target = _cpu()
        if policy.cpu_level is None:
            return target
        levels = [level.partition(":")[2] for level in target.levels]
        if policy.cpu_level not in levels:
            raise PolicyError(f"cpu_level {policy.cpu_level!r}: this CPU runs {', '.join(levels)}")
        lower = Target.parse(f"cpu:{policy.cpu_level}")
        return replace(target, name=lower.name, arch=lower.arch, features=lower.features)
    kinds = _vendors_of()
    if kind not in kinds or not (index or "0").isdecimal():
        raise ValueError(
            f"device {device!r}: expected cpu, {', '.join(kinds)}, or one of these with an index, cuda:1"
        )
    # torch counts the devices of one vendor: AMD's are called cuda too, where there is no NVIDIA one.
    by_vendor = ([t for t in _devices() if t.vendor == vendor] for vendor in kinds[kind])
    targets = next((group for group in by_vendor if group), [])
    position = int(index or 0)
    if position >= len(targets):
        raise ValueError(f"device {device}: this machine has {len(targets)} such accelerator(s)")
    return targets[position]


def device_index(device: str) -> int:
    """The index of ``cuda:1`` as `Tensor.get_device` returns it: −1 for the CPU; of ``cuda``, the current device's."""
    import torch

    torch_device = torch.device(device)
    if torch_device.type == "cpu":
        return -1
    return torch.accelerator.current_device_index() if torch_device.index is None else torch_device.index


def on_device(device: str) -> AbstractContextManager[object]:
    """The context in which `device` is the current one, as kernels expect it; nothing for the CPU."""
    import torch

    return nullcontext() if device == "cpu" else torch.accelerator.device_index(device_index(device))


def free_bytes(device: str) -> int:
    """Bytes that can still be allocated on a device: on a GPU including memory that torch has reserved but does not use, on a CPU including memory
    that the operating system can reclaim, within the limit of the control group of this process."""
    import torch

    if device != "cpu":
        with on_device(device):
            idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return int(torch.cuda.mem_get_info()[0]) + idle
    return cpu_memory()[0]


def cpu_memory() -> tuple[int, int]:
    """Bytes that this process can still allocate, including memory that the operating system can reclaim, and all bytes of the machine; both within
    the limit of its control group."""
    free, total = _available(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = _group()
    return (free, total) if group is None else (min(free, group[0]), min(total, group[1]))


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


GROUPS = Path("/sys/fs/cgroup")
_GROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""By version of control groups, 2 and 1: the folder, and the files of the limit and of what is used; the entry of memory.stat."""


def _group(root: Path = GROUPS) -> tuple[int, int] | None:
    """Bytes left in the control group of this process, files that can be dropped from memory not counted as used, and its limit; None without
    one."""
    for folder, limit, used, droppable in _GROUP_FILES:
        place = root / folder
        try:
            most = int((place / limit).read_text(encoding="ascii"))
            counts = dict(
                line.split() for line in (place / "memory.stat").read_text(encoding="ascii").splitlines()
            )
            held = int((place / used).read_text(encoding="ascii")) - int(counts.get(droppable, 0))
        except (OSError, ValueError):  # another version of control groups, or a limit of "max"
            continue
        return most - held, most
    return None


def torch_name(vendor: str, index: int) -> str:
    """torch's name of the device `index` of a vendor's."""
    kind = next(kind for kind, vendors in _vendors_of().items() if vendor in vendors)
    return kind if kind == "cpu" else f"{kind}:{index}"


def _vendors_of() -> dict[str, tuple[str, ...]]:
    """Type of torch's devices -> the vendors whose devices it stands for."""
    kinds: dict[str, tuple[str, ...]] = {"cuda": ("nvidia", "amd"), "xpu": ("intel",)}
    for vendor in plugged().vendors.values():
        kinds[vendor.torch] = (*kinds.get(vendor.torch, ()), vendor.name)
    return kinds


@cache
def _cpu() -> Target:
    return probe_cpu()


@cache
def _devices() -> tuple[Target, ...]:
    return tuple(probe_devices().targets)
