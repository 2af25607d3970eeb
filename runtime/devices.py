"""The device that a model runs on: a name of torch's, or ``auto``. `notice` tells the user which one, and how a model is loaded."""

from __future__ import annotations

import logging
import sys

import torch

from gristmill import ops
from gristmill.autotune.device import device_target
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import runs_code_of
from gristmill.kernel_registry.targets.probe import probe_devices
from gristmill.runtime.errors import UsageError

KNOWN = "known: auto, cpu, cuda, cuda:0, ..."
NEEDED = ("linear", "paged_attention")
"""Operations of every model. A GPU that has only torch's own kernels for one of them is slower than the CPU with ours."""
RUNNABLE = ("selected", "eligible", "unverified")
"""Verdicts of kernels that run here, or will once they are verified."""


def parse_device(name: str | torch.device, policy: Policy | None = None) -> torch.device:
    """The device of a name; UsageError if it does not exist. ``auto`` is `auto_device` under the policy, which a notice reports."""
    if name == "auto":
        device, line = auto_device(policy or Policy.current())
        notice(f"device auto: {line}")
        return device
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"unknown device {name!r}; {KNOWN}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}; {KNOWN}")
    if device.type == "cuda":
        count = _count()
        if (device.index or 0) >= count:
            raise UsageError(f"no device {name!r} here: torch sees {count} CUDA devices; use device='cpu'")
        device = torch.device("cuda", device.index or 0)
    return device


def auto_device(policy: Policy) -> tuple[torch.device, str]:
    """The first GPU that kernels run on under the policy, else the CPU; and which one it is, with what is wrong with GPUs passed over.

    Creates no CUDA context, so a process that only starts ranks or replicas takes no memory of a GPU.
    """
    reasons: list[str] = []
    for index in range(_count()):
        device = torch.device("cuda", index)
        why = _why_not(device, policy)
        if why is None:
            target = device_target(str(device), policy)
            return device, "; ".join([f"{device} ({target.device or target.name})", *reasons])
        reasons.append(f"not {device}: {why}")
    if not reasons:
        unseen = [target.device or target.name for target in probe_devices().targets]
        beside = f", although this machine has {', '.join(unseen)}" if unseen else ""
        reasons.append(f"torch {torch.__version__} sees no CUDA device{beside}")
    return torch.device("cpu"), "; ".join(["the CPU", *reasons])


def _count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _why_not(device: torch.device, policy: Policy) -> str | None:
    """Why models do not run on a GPU; None if they do."""
    try:
        target = device_target(str(device), policy)
    except ValueError as error:  # an architecture that the registry does not know
        return str(error)
    built = [code.partition(":")[0] for code in torch.cuda.get_arch_list()]
    if not any(runs_code_of(target, code) for code in built):
        return f"torch {torch.__version__} is built for {', '.join(built) or 'no GPU'}, not for {target.name}"
    registry, resolver = default_registry(), ops.resolver(device, policy)
    for op in map(registry.op, NEEDED):
        problem = op.problem(op.bench[0])
        candidates = resolver.select(op, problem).candidates
        if not any(c.kernel.language != "python" and c.verdict in RUNNABLE for c in candidates):
            return f"no kernel but torch's own runs {op.name} on {target.name}"
    return None


LOG = logging.getLogger("gristmill")


def notice(text: str) -> None:
    """One line, at INFO, to the logger ``gristmill``; to stderr in a program that has not set up logging, where INFO would be lost."""
    if LOG.hasHandlers():
        LOG.info(text)
    else:
        print(f"gristmill: {text}", file=sys.stderr)
