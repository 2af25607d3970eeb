"""Processes of replicas that load the model: which GPUs they see, how far they are, and whether they have come through."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import wait
from typing import Any

import torch

from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.runtime.parallel.child_process import ChildProcess, Failure
from gristmill.runtime.parallel.replica_front import death


def await_loaded(
    children: Iterable[ChildProcess],
    seconds: float,
    on_progress: Callable[[int, str, int, int], None] | None = None,
) -> None:
    """Wait until processes have loaded the model. `on_progress` gets the number of a process, and what it reports: ("loading", phase, done, total).

    Raises:
        ReplicaError: one died, or has not loaded it in time. What loading raised in one.
    """
    deadline = time.monotonic() + seconds
    loading = list(children)
    while loading:
        ready = wait([child.connection for child in loading], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(child.number) for child in loading)
            raise ReplicaError(f"replica {late} did not load the model in time")
        for child in [one for one in loading if one.connection in ready]:
            message = _received(child)
            if message[0] == "loaded":
                loading.remove(child)
            elif on_progress is not None:
                on_progress(child.number, *message[1:])


def _received(child: ChildProcess) -> tuple[Any, ...]:
    try:
        message: tuple[Any, ...] | Failure = child.connection.recv()
    except (EOFError, OSError):
        raise ReplicaError(death(child, "while it loaded the model")) from None
    if isinstance(message, Failure):
        failed = ReplicaError(f"replica {child.number} failed to load the model\n{message.text}")
        raise message.error if isinstance(message.error, ValueError | RuntimeError) else failed
    return message


def environments(count: int, skip: int, options: Mapping[str, Any]) -> list[dict[str, str]]:
    """What distinguishes the environments of replicas: the GPUs that they see. UsageError: there are too few."""
    if options["device"] != "cuda":
        return [{}] * count
    each, visible = options.get("tensor_parallel", 1), os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    groups = [devices[first : first + each] for first in range(skip, skip + each * count, each)]
    if len(devices) < skip + each * count:
        raise UsageError(
            f"{count} replicas need {each} GPUs each, {len(devices) - skip} are free; device='cpu' has them all on the CPU"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]
