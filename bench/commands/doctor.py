"""kernelbench doctor: what this machine and this installation have."""

from __future__ import annotations

from typing import Any

import click

from gristmill import __version__, console
from gristmill.autotune.device import torch_name
from gristmill.bench import options
from gristmill.bench.peers import PEERS
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.grades import FAILED, GRADES, best
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, StoreError
from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.targets import VENDORS
from gristmill.kernel_registry.targets.plugged import plugged
from gristmill.kernel_registry.targets.probe import probe_cpu, probe_devices


@click.command()
@click.option(
    "--measure",
    is_flag=True,
    help="Measure the ceilings again: read and copy bandwidth, matrix rates by dtype, launch cost (some seconds per device).",
)
@options.as_json
def doctor(measure: bool, as_json: bool) -> None:
    """What this machine has: devices and their features, compiled code, packages, policy and store; and what is missing.

    On a CPU also its cores, the ones that this process is pinned to, its cgroup quota, NUMA nodes, and torch's threads; on
    an NVIDIA GPU its clocks, power, temperature, and whether it is being throttled. --measure stores the ceilings next to the
    store, for all roofline figures: read and copy bandwidth from memory; rates of matrix products (on a
    CPU of fused multiply-add, fp32, AVX512-BF16 or AMX, bf16, and VNNI, int8); and what slowed the device down meanwhile.
    """
    from gristmill.autotune.floor import (
        kept,
        remeasure,
    )  # also imports torch, so that its number of threads is known

    probed = probe_devices()
    build, policy, registry = Build.probe(), Policy.current(), default_registry()
    devices = [*probed.targets, probe_cpu()]
    report: dict[str, Any] = {
        "version": __version__,
        "devices": [_device(target) for target in devices],
        "no_device": [*probed.reasons],
        "build": {
            "cpu_levels": [*build.cpu_levels],
            "cuda": [*build.cuda_archs],
            "hip": [*build.hip_archs],
            "library": build.library or None,
            "torch": build.torch,
            "triton": build.triton,
            "driver": build.driver or None,
            "python": build.python,
            "compilers": dict(build.compilers),
        },
        "packages": {name: build.version(name) for name in _wrapped()},
        "policy": policy.origin,
        "unmatched": policy.unmatched(registry),
        "store": _store(policy),
        "registry": {"operations": len(registry.ops), "kernels": sum(1 for _ in registry.all_kernels())},
        "failed_plugins": [failure.as_dict() for failure in (*registry.failures, *plugged().failures)],
    }
    vendors = [target.vendor for target in probed.targets]
    names = [*(torch_name(v, vendors[:i].count(v)) for i, v in enumerate(vendors)), "cpu"]
    for name, device in zip(names, report["devices"], strict=True):
        if device["vendor"] not in VENDORS:  # of a plugin: times are not measured there
            continue
        limits = remeasure(name) if measure else kept(name)
        device["measured"] = None if limits is None else limits.as_dict()
    if as_json:
        console.emit(report)
        return
    _print(report)


def _device(target: Target) -> dict[str, Any]:
    return {
        "target": target.name,
        "device": target.device or None,
        "vendor": target.vendor,
        "features": sorted(target.features),
        "multiprocessors": target.multiprocessors,
        "memory_gib": None if target.memory_bytes is None else round(target.memory_bytes / 2**30, 1),
        "levels": [*target.levels],
        "proofs": _proofs(target),
        "state": _state(target),
        "measured": None,
    }


def _proofs(target: Target) -> dict[str, int]:
    """How many kernels that can run on a device have each grade of proof as their best, before they are verified on it."""
    found = [
        best(kernel, target)
        for kernel in default_registry().all_kernels()
        if not kernel.requires.check_hardware(target)
    ]
    counts = {
        grade: sum(p is not None and p.grade == grade for p in found)
        for grade in (*GRADES, FAILED)
        if grade != "here"
    }
    return {**counts, "none": found.count(None)}


def _state(target: Target) -> dict[str, Any] | None:
    """The state that may change from one moment to the next."""
    if target.vendor == "cpu":
        from gristmill.autotune.environment import cpu_state

        return cpu_state()
    if target.vendor == "nvidia":
        from gristmill.autotune.environment import gpu_state

        return gpu_state()
    return None


def _wrapped() -> list[str]:
    wrapped = {name for kernel in default_registry().all_kernels() for name, _ in kernel.requires.packages}
    return sorted(wrapped | {peer.package for peer in PEERS})


_NONE = {"pinned": "not pinned", "quota": "no quota"}
"""What an empty value means, for entries where it has a meaning."""


def _said(name: str, value: Any) -> str:
    return _NONE[name] if value is None else f"{name} {value}"


def _store(policy: Policy) -> dict[str, Any]:
    try:
        store = Store.read(policy.store_path)
    except StoreError as error:
        return {"path": str(policy.store_path), "verifications": None, "timings": None, "error": str(error)}
    return {
        "path": str(policy.store_path),
        "verifications": len(store.verifications),
        "timings": len(store.timings),
        "error": None,
    }


def _print(report: dict[str, Any]) -> None:
    build, store = report["build"], report["store"]
    rows = [
        ["gristmill", report["version"]],
        ["registry", "{operations} operations, {kernels} kernels".format(**report["registry"])],
    ]
    rows += [
        ["failed plugin", "{name} ({module}, from {distribution}): {reason}".format(**failure)]
        for failure in report["failed_plugins"]
    ]
    for device in report["devices"]:
        memory = f", {device['memory_gib']} GiB" if device["memory_gib"] else ""
        rows.append(
            [
                device["target"],
                f"{device['device'] or device['vendor']}, {device['multiprocessors']} processors{memory}",
            ]
        )
        rows.append(["", ", ".join(device["features"])])
        counted = ", ".join(f"{count} {grade}" for grade, count in device["proofs"].items() if count)
        rows.append(["  proofs", f"{counted} (kernels by their best grade before a verification here)"])
        if device["state"]:
            rows.append(
                [
                    "  now",
                    ", ".join(
                        _said(name, value)
                        for name, value in device["state"].items()
                        if value is not None or name in _NONE
                    ),
                ]
            )
        if device["measured"]:
            rates = ", ".join(
                f"{name} {console.number(rate)} TFLOP/s"
                for name, rate in device["measured"]["tflops"].items()
            )
            measured = device["measured"]
            speeds = ", ".join(
                f"{what} {console.number(measured[f'{what}_gbs'])} GB/s" for what in ("read", "copy")
            )
            launch = f", launch {console.number(measured['launch_us'])} µs" if measured["launch_us"] else ""
            rows.append(["  measured", f"{speeds}, {rates}{launch}"])
            rows += [
                ["  throttled", f"{what}: the ceilings may be too low"] for what in measured["throttled"]
            ]
    rows += [["no accelerator", reason] for reason in report["no_device"]]
    rows.append(
        [
            "C++ levels",
            ", ".join(build["cpu_levels"]) or "none: run make build, or install with a C++20 compiler",
        ]
    )
    rows.append(["CUDA code", ", ".join(build["cuda"]) or "none: built without nvcc"])
    rows.append(["HIP code", ", ".join(build["hip"]) or "none: built without clang for AMD GPUs"])
    rows += [[name, build[name] or "not installed"] for name in ("torch", "triton")]
    rows += [
        [name, version or "not installed (optional)"]
        for name, version in report["packages"].items()
        if name not in ("torch", "triton")
    ]
    rows.append(["policy", "\n".join([report["policy"], *report["unmatched"]])])
    rows.append(
        [
            "store",
            store["error"]
            or f"{store['path']}: {store['verifications']} verifications, {store['timings']} times",
        ]
    )
    console.table("Doctor", ["what", "found"], rows)
