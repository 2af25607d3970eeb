"""Starting the KV transfer of an engine; configurations that exclude it are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer import CachePool
from gristmill.runtime.kv_transfer.blocks import CacheBlocks
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.kv_transfer.identity import identity_of_files, root_key, root_of_ranks
from gristmill.runtime.kv_transfer.record_carrier import RecordCarrier
from gristmill.runtime.kv_transfer.remote_blocks import RemoteBlocks
from gristmill.runtime.kv_transfer.transfer import Transfer
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.runner import Runner
from gristmill.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from gristmill.runtime.speculation.config import Speculation


def identity_of(config: KVTransfer, path: Path, *schemes: object) -> KVTransfer:
    """The configuration with the identity of the weights at a path, quantized to these schemes at load.

    Raises:
        UsageError: it has none, and there are no weight files to make one of.
    """
    weights = identity_of_files(path) if config.identity is None else config.identity
    return replace(config, identity=f"{weights} {schemes}")


def start_transfer(
    config: KVTransfer,
    runner: Runner | ParallelRunner,
    scheduler: Scheduler,
    speculation: Speculation | None,
) -> Transfer:
    """The transfer between a runner's cache and the stores of a configuration.

    Raises:
        UsageError: no prefix cache, no identity, or a model that drafts; a store that cannot be opened.
    """
    if speculation is not None and speculation.spec.open is not None:
        raise UsageError(
            f"kv_transfer cannot be combined with speculate={speculation.method!r}: the blocks of the model that drafts are not transferred"
        )
    if scheduler.cache is None:
        raise UsageError(
            "kv_transfer finds blocks by the prefix cache: it cannot be combined with enable_prefix_cache=False"
        )
    if config.identity is None:
        raise UsageError("an engine of parts does not know its weight files: give KVTransfer(identity=...)")
    opened = config.open()
    if isinstance(runner, ParallelRunner):
        if isinstance(opened, CachePool):
            raise UsageError(
                f"kv_transfer={config.stores[0]!r} cannot be combined with tensor_parallel; take a store"
            )
        remote = RemoteBlocks(runner)
        root = root_of_ranks(config.identity, runner.ranks, remote.nbytes)
        return Transfer(config, scheduler, RecordCarrier(opened, remote), root)
    root = root_key(config.identity, runner.model, runner.cache)
    if isinstance(opened, CachePool):
        carrier = opened.carrier(runner.cache, runner.device, scheduler, root, runner.model.plans.policy)
        return Transfer(config, scheduler, carrier, root)
    blocks = CacheBlocks(runner.cache, runner.device)
    return Transfer(config, scheduler, RecordCarrier(opened, blocks), root)
