"""Where selection applies: a device of this machine, or a target that is only described."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gristmill.autotune.device import device_target, torch_name
from gristmill.autotune.resolve import confirmed_build, imported_build
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.targets.probe import probe_cpu, probe_devices

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """A target, and the torch device that it is here (None: it is not here, so nothing can run or be verified)."""

    target: Target
    device: str | None
    build: Build
    policy: Policy

    def why_not(self, kernel: Kernel, problem: Problem) -> str:
        """Why `kernel` cannot run `problem` here; "" if it can."""
        return "; ".join(kernel.why_not(problem, self.target, self.build))


def place(target: str | Target | torch.device | None, policy: Policy | None = None) -> Place:
    """The place that a target's name, a Target or a torch device stands for; None = the first GPU of this machine, else its CPU.

    A CPU level that this CPU runs is here (held to that level). Without a policy, the one that GRISTMILL_POLICY names counts.

    Raises:
        ValueError: an unknown target, or a torch device that is not here.
    """
    policy = policy or Policy.current()
    devices = tuple(probe_devices().targets)
    if target is None:
        if devices:
            return Place(devices[0], _torch_name(devices, 0), _build(devices[0], policy), policy)
        return _cpu(policy, policy.cpu_level)
    if not isinstance(target, Target):
        name = str(target).lower()
        if name == "cpu":
            return _cpu(policy, policy.cpu_level)
        if name.partition(":")[0] == "cuda":
            local_target = device_target(name, policy)
            return Place(local_target, name, _build(local_target, policy), policy)
        target = Target.parse(str(target))
    for index, device in enumerate(devices):
        if device.name == target.name and (not target.device or target.device == device.device):
            return Place(device, _torch_name(devices, index), _build(device, policy), policy)
    if target.name in probe_cpu().levels:
        return _cpu(policy, target.name.partition(":")[2])
    return Place(target, None, _foreign_build(target), policy)


def imported(place: Place, kernels: Iterable[Kernel]) -> Place:
    """`here`, with modules imported that `kernels` need and whose source does not tell what they offer.

    Selection and lists report "only an import can tell"; a benchmark imports the module to decide.
    """
    fit = [
        k
        for k in kernels
        if place.device is not None and not k.requires.check_hardware(place.target, place.build)
    ]
    if not any(place.build.why_not_offer(offer) for kernel in fit for offer in kernel.requires.offers):
        return place
    from gristmill.autotune import clock

    before = clock.originals()
    build = imported_build(place.build, fit)
    if changed := clock.tampered(before):
        raise RuntimeError(
            f"a module that {', '.join(k.name for k in fit)} need replaced {changed} when it was imported; "
            "no time could be trusted: leave its kernel out with --kernels"
        )
    return replace(place, build=build)


def _cpu(policy: Policy, level: str | None) -> Place:
    policy = replace(policy, cpu_level=level)
    target = probe_cpu()
    if level is not None:
        lower = Target.parse(f"cpu:{level}")
        target = replace(target, name=lower.name, arch=lower.arch, features=lower.features)
    return Place(target, "cpu", _build(target, policy), policy)


def _torch_name(devices: tuple[Target, ...], index: int) -> str:
    """torch's name of a device: it counts those of one vendor."""
    vendor = devices[index].vendor
    return torch_name(vendor, sum(device.vendor == vendor for device in devices[:index]))


def _build(target: Target, policy: Policy) -> Build:
    return confirmed_build(default_registry(), target, policy)


def _foreign_build(target: Target) -> Build:
    """What this installation would be there: its packages, and Triton's compiler instead of its interpreter."""
    return replace(confirmed_build(default_registry(), target), triton_interpreter=False)
