"""Memory and state of an engine between its steps: sleep, new weights, the prefix cache and its events, status; and objects that Python's
garbage collector skips."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.events import CacheEvent
from gristmill.runtime.kv_transfer.transfer import Transfer
from gristmill.runtime.ownership import Ownership
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.parallel.remote import RemoteResidency
from gristmill.runtime.residency import Part, Residency
from gristmill.runtime.runner import Runner
from gristmill.runtime.scheduler import Scheduler
from gristmill.runtime.speculation.speculator import Speculator
from gristmill.runtime.status import EngineStatus, State
from gristmill.runtime.warm_up import WarmUp

if TYPE_CHECKING:
    from gristmill.runtime.weight_update import WeightSource


class EngineMemory:
    """The part of `gristmill.Engine` that a program with an engine inside uses between its steps."""

    runner: Runner | ParallelRunner
    scheduler: Scheduler
    residency: Residency | RemoteResidency
    speculator: Speculator | None
    transfer: Transfer | None
    _quant: str | QuantScheme | torch.dtype | None
    ownership: Ownership
    warmed: WarmUp | None
    late_compilations: int
    _draining: bool

    def sleep(self, level: int = 1) -> None:
        """Give memory back to the device: cache, decode graphs, and weights. Nothing runs until `wake_up`; requests may be added, and wait.

        Args:
            level: 1 moves the weights to host memory (on a CPU they stay); 2 discards them, for an `update_weights` after `wake_up`.

        Raises:
            UsageError: a request has begun and not ended (`pause` or `abort` first), the engine sleeps already, or `kv_transfer` copies blocks
                for longer than its timeout.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise UsageError(f"level must be 1 or 2, got {level!r}")
        if self.residency.absent:
            raise UsageError("the engine sleeps already: call wake_up first")
        self._require_none_started("sleep")
        if self.transfer is not None:
            self.transfer.settle()
        self.reset_prefix_cache()
        if self.transfer is not None:
            self.transfer.sleep()
        if self.speculator is not None:
            self.speculator.sleep()
        self.residency.sleep(level)
        self.warmed = None  # graphs are gone

    def wake_up(self, parts: Collection[Part] = ("weights", "kv_cache")) -> None:
        """Allocate what `sleep` gave back. `parts` can be given one by one, so that weights are updated before the cache takes its memory."""
        self.ownership.check()
        asleep = "kv_cache" in self.residency.absent
        self.residency.wake_up(parts)
        if self.transfer is not None and asleep and "kv_cache" in parts:
            self.transfer.wake_up()
        if self.speculator is not None:
            self.speculator.wake_up(parts)

    def update_weights(
        self,
        source: WeightSource,
        quant: str | QuantScheme | torch.dtype | None = None,
        staging: str | torch.device | None = None,
    ) -> None:
        """Write new weights into the memory of the old ones: plans, packed layouts and CUDA graphs stay. The prefix cache is emptied.

        Args:
            source: a directory or GGUF file with the configuration of the loaded model, or a mapping of all its tensors by their names in
                the checkpoint.
            quant: the scheme to round the weights to; None = as at load.
            staging: where the new model is built, which takes the memory of a second model; None = the engine's device.

        Raises:
            CheckpointError: a tensor is missing, superfluous or of a wrong shape, or the model would change; the old weights stay.
            UsageError: a request has begun and not ended, the weights sleep, or `kv_transfer` copies blocks for longer than its timeout.
        """
        self._require_none_started("update_weights")
        if self.transfer is not None:
            self.transfer.settle()
        self.residency.update(source, self._quant if quant is None else quant, staging)
        self.reset_prefix_cache()
        if self.transfer is not None:
            self.transfer.new_weights()
        if self.speculator is not None:
            self.speculator.reset()

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes of earlier requests."""
        self.ownership.check()
        if self.scheduler.cache is not None:
            self.scheduler.cache.clear()

    def record_cache_events(self, record: bool = True) -> None:
        """From now on keep the events of the prefix cache for `take_cache_events`, which is to be called regularly; False = no more.

        If the cache holds blocks already, or events are recorded already, the first ones are an AllBlocksCleared and the blocks that are
        there: for a router that starts to listen, or starts again.

        Raises:
            UsageError: there is no prefix cache.
        """
        self.ownership.check()
        if self.scheduler.cache is None:
            raise UsageError(
                "the engine has no prefix cache, and so no events of one: enable_prefix_cache is False"
            )
        self.scheduler.cache.record_events(record)

    def take_cache_events(self) -> list[CacheEvent]:
        """The events of the prefix cache since the last call, in order. If they are of more blocks than the cache has, it is an
        AllBlocksCleared instead, and the blocks that are there."""
        self.ownership.check()
        cache = self.scheduler.cache
        return [] if cache is None else cache.take_events()

    def flush_kv_transfer(self, seconds: float = 30.0) -> bool:
        """Wait until the blocks that were to be saved by `kv_transfer` are in its stores, for another process to find them. Whether that was
        within `seconds`."""
        return self.transfer is None or self.transfer.flush(seconds)

    @property
    def late_kernels(self) -> int | None:
        """Kernels that were selected or compiled after the warm-up, while requests waited; None where only ranks know."""
        late = self.runner.model.plans.late
        return None if late is None else late + self.late_compilations

    def status(self) -> EngineStatus:
        """Capacity and load, as values; costs no step."""
        scheduler, config, pool = self.scheduler, self.scheduler.config, self.scheduler.pool
        state: State = "paused" if scheduler.paused is not None else "running"
        if self.residency.reason:
            state = "sleeping" if self.residency.absent else "outdated"
        elif self._draining:
            state = "draining"
        return EngineStatus(
            state=state,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.held),
            waiting_tokens=scheduler.queued_tokens,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            used_blocks=pool.num_referenced,
            cached_blocks=pool.num_cached,
            max_request_tokens=config.capacity,
            max_seqs=config.max_seqs,
            max_batch_tokens=config.max_batch_tokens,
            weight_bytes=self.runner.model.plans.weight_bytes,
            cache_bytes=self.runner.cache.nbytes,
            graph_bytes=self.runner.graph_bytes,
            late_kernels=self.late_kernels,
            speculation=None if self.speculator is None else self.speculator.status(),
            kv_transfer=None if self.transfer is None else self.transfer.status(),
        )

    def _require_none_started(self, call: str) -> None:
        self.ownership.check()
        if self.scheduler.has_started():
            raise UsageError(
                f"{call} while requests have begun and not ended: pause('wait') or pause('abort'), and step until paused"
            )


FROZEN_AT_START = 5_000
"""More objects than Python itself freezes as it starts: Python 3.12 does with a few hundred."""


def freeze_before_load(owner: object) -> None:
    """As `freeze_heap`, before a device is used, and without a collection: those of the load, and the one at its end, then leave out torch and all
    else that was imported, which takes each of them 0.1 to 0.4 s. Garbage among it, which cannot hold memory of a device, stays until `owner` is
    freed.

    Does nothing in a process that has used a device, or frozen something.
    """
    if not torch.cuda.is_initialized() and gc.get_freeze_count() < FROZEN_AT_START:
        gc.freeze()
        weakref.finalize(owner, gc.unfreeze).atexit = False


def freeze_heap(owner: object) -> None:
    """Collect garbage; then later collections leave out every object that is alive now, until `owner` is freed.

    A full collection visits each object of the process. With torch and Triton imported these are hundreds of thousands, most of which
    are never freed; next to a GPU that took 0.2 to 0.6 s, in which no step was launched. Cycles among frozen objects are not freed, so
    `owner` must not be part of one: it must be freed with its last reference.

    Objects that the program had frozen before stay frozen: Python cannot thaw some of them alone, so then nothing is when `owner` is freed.
    """
    thaw = gc.get_freeze_count() < FROZEN_AT_START
    gc.collect()
    gc.freeze()
    if thaw:
        weakref.finalize(owner, gc.unfreeze).atexit = False
