"""What an engine sees of a model that is on other processes: its sizes, and its memory, which the ranks give back and take again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.runtime.devices import parse_device
from gristmill.runtime.errors import UsageError
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.parallel.mesh import Mesh, local_config
from gristmill.runtime.parallel.rank_processes import RanksConfig
from gristmill.runtime.progress import Progress
from gristmill.runtime.residency import Part


def start_ranks(
    model: str | Path | Checkpoint,
    world: int,
    timeout: float,
    device: str | torch.device,
    policy: Policy | None,
    max_model_len: int | None,
    loading: Mapping[str, Any],
    progress: Progress | None = None,
    **sizes: Any,
) -> ParallelRunner:
    """The ranks of a model, with weights and cache.

    Args:
        loading: arguments of `load_model` other than path, device and policy.
        progress: told how far rank 0 is.
        sizes: fields of `RanksConfig`, as the engine's caller gave them.

    Raises:
        UsageError: a model, a device and a number of ranks that cannot be combined.
        RankError: a rank died, or did not load the model in time.
    """
    checkpoint = open_checkpoint(model)
    config = parse_config(*checkpoint.config()).for_length(max_model_len)
    spread = bool(sizes["context_parallel"])
    # Refuses heads before any process is started.
    local_config(config, Mesh(0, world, context_parallel=spread))
    kind = device_of_ranks(world, device, policy)
    if spread and any(config.chunks):
        raise UsageError(
            f"context_parallel spreads whole contexts over ranks; {config.architecture} has layers with chunks of {max(config.chunks)} tokens, "
            "for which tensor_parallel alone is made"
        )
    if spread and any(config.windows):
        raise UsageError(
            "context_parallel spreads whole contexts over ranks; "
            f"{config.architecture} has layers that see a window of {max(config.windows)} tokens, for which tensor_parallel alone is made"
        )
    limit = min(max_model_len or config.max_position, config.max_position)
    given = {"path": str(checkpoint.path), **loading}
    policy = policy or Policy.current()
    return ParallelRunner(
        config, RanksConfig(world, kind, policy, given, limit, timeout=float(timeout), **sizes), progress
    )


def device_of_ranks(world: int, device: str | torch.device, policy: Policy | None) -> str:
    """``cpu`` or ``cuda``, on which so many ranks can run; UsageError if there is none."""
    kind = parse_device(device, policy).type if str(device) == "auto" else str(device)
    if kind not in ("cpu", "cuda"):
        raise UsageError(
            f"tensor_parallel={world} takes device 'auto', 'cpu' or 'cuda', of which rank r has cuda:r; got {kind!r}"
        )
    if kind == "cuda" and torch.cuda.device_count() < world:
        raise UsageError(
            f"tensor_parallel={world} needs {world} CUDA devices; torch sees {torch.cuda.device_count()}; "
            "device='cpu' has all ranks on the CPU"
        )
    return kind


class RemoteResidency:
    """As `Residency`, on all ranks."""

    def __init__(self, runner: ParallelRunner) -> None:
        self.runner = runner
        self.absent: set[Part] = set()

    @property
    def reason(self) -> str:
        """Why no step can run; "" if one can."""
        return "the engine sleeps: call wake_up" if self.absent else ""

    def sleep(self, level: int) -> None:
        """Give back the cache and, on GPUs, the weights, to host memory."""
        if level != 1:
            raise UsageError(
                "sleep(level=2) is followed by update_weights, which a model over several ranks does not have"
            )
        self.runner.call("sleep", level)
        self.absent = {"kv_cache", "weights"}

    def wake_up(self, parts: Collection[Part]) -> None:
        """Allocate parts that were given back."""
        self.runner.call("wake_up", list(parts))
        self.absent -= set(parts)

    def update(self, source: object, quant: object, staging: object) -> None:
        """Refused."""
        raise UsageError(
            "update_weights does not reach the ranks of tensor_parallel yet; make a new engine with the new weights"
        )
