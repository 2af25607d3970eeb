"""What metrics tell of an engine after each step: plain data, which crosses processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gristmill.runtime.kv_transfer.statistics import TransferStatus

if TYPE_CHECKING:
    from gristmill.runtime.engine import Engine


class EngineLoad(NamedTuple):
    """An engine after a step.

    Attributes:
        running, waiting: requests with cache blocks, and without.
        cache_use: the fraction of the cache blocks in use by requests.
        graph_bytes, late_kernels: as in `EngineStatus`, 0 where it has None.
        step_tokens: tokens that the step computed; None = it was empty.
        preempted: requests that lost their blocks in it.
        drafts: runs of drafts, drafted tokens, and accepted ones by position, since the engine was made; None = it does not draft.
        transfer: counts of `kv_transfer`; None = the engine has no stores.
    """

    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    graph_bytes: int = 0
    late_kernels: int = 0
    step_tokens: int | None = None
    preempted: int = 0
    drafts: tuple[int, ...] | None = None
    transfer: TransferStatus | None = None

    @classmethod
    def of(cls, engine: Engine) -> EngineLoad:
        """That of an engine right after a step, in its thread."""
        scheduler, speculator, transfer = engine.scheduler, engine.speculator, engine.transfer
        step = engine.last_step
        counts = None if speculator is None else speculator.counts
        return cls(
            len(scheduler.running),
            len(scheduler.waiting) + len(scheduler.held),
            scheduler.pool.num_referenced / scheduler.config.num_blocks,
            engine.runner.graph_bytes or 0,
            engine.late_kernels or 0,
            step.num_tokens if step is not None and step.entries else None,
            len(step.preempted) if step is not None and step.entries else 0,
            None if counts is None else (counts.drafts, counts.draft_tokens, *counts.accepted),
            None if transfer is None else transfer.status(),
        )
