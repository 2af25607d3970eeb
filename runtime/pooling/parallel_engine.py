"""Pooling over several ranks: batches are chosen in this process, and computed by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.models import model_table
from gristmill.runtime.parallel.mesh import Mesh, local_config
from gristmill.runtime.parallel.rank_processes import RankProcesses, RanksConfig
from gristmill.runtime.parallel.remote import device_of_ranks
from gristmill.runtime.pooling.engine import PoolingInput, PoolingQueue
from gristmill.runtime.progress import Progress
from gristmill.runtime.warm_up import WarmUp


class PoolingRanks(RankProcesses):
    """The ranks of a model for pooling.

    Attributes:
        max_seqs, max_batch_tokens: of a batch.
    """

    module = "gristmill.runtime.parallel.pooling_rank"

    def _load(self, warm: bool) -> None:
        first, *_ = self._loaded()
        self.max_seqs, self.max_batch_tokens = first.max_seqs, first.max_batch_tokens

    def compute(self, inputs: Sequence[PoolingInput]) -> list[Tensor]:
        """As of `PoolingQueue`. RankError: a rank died or was late; the next call starts them again."""
        self.ensure_started()
        return [torch.from_numpy(row) for row in self.call("compute", [*inputs])[0]]

    def warm_up(self, progress: Progress) -> WarmUp:
        """As `gristmill.runtime.pooling.warm_up.warm_up`, on all ranks."""
        return self._warmed(progress)

    def explain(self) -> list[dict[str, Any]]:
        """The rows of `LLM.explain`, of rank 0."""
        self.ensure_started()
        rows: list[dict[str, Any]] = self.call("explain")[0]
        return rows


class ParallelPoolingEngine(PoolingQueue):
    """An engine whose batches ranks compute. Arguments are those of `PoolingQueue`."""

    def __init__(self, ranks: PoolingRanks, max_length: int, options: EngineConfig) -> None:
        super().__init__(
            ranks.model,
            max_batch_tokens=ranks.max_batch_tokens,
            max_seqs=ranks.max_seqs,
            max_length=max_length,
            max_queued=options.max_queued,
            max_queued_tokens=options.max_queued_tokens,
        )
        self.ranks = ranks

    def compute(self, inputs: Sequence[PoolingInput]) -> Sequence[Tensor]:
        """As of `PoolingQueue`."""
        return self.ranks.compute(inputs)

    def explain(self) -> list[dict[str, Any]]:
        """The rows of rank 0, between two batches."""
        with self._running:
            return self.ranks.explain()

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()


def start_pooling_ranks(
    path: str, config: ModelConfig, options: EngineConfig, progress: Progress
) -> PoolingRanks:
    """The ranks of a model for pooling, which each load their share.

    Args:
        path: of the model, as `open_checkpoint` takes it.

    Raises:
        UsageError: a model, a device and a number of ranks that cannot be combined.
        RankError: a rank died, or did not load the model in time.
    """
    world = options.tensor_parallel
    if not any(weight.shard for weight in model_table(config).weights):
        raise UsageError(
            f"tensor_parallel={world}: the family of {config.architecture} does not declare how its weights are sharded"
        )
    local_config(config, Mesh(0, world))
    policy = options.loaded_policy or Policy.current()
    kind = device_of_ranks(world, options.device, policy)
    loading = {"path": path, "options": options}
    ranks = RanksConfig(
        world, kind, policy, loading, config.max_position, timeout=float(options.rank_timeout)
    )
    return PoolingRanks(config, ranks, progress)
