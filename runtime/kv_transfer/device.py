"""Blocks that stay in the caches of processes: others of the same host copy them from there, from one GPU to another where they are on GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.external import ExternalCache
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.kv_transfer import StoreSpec
from gristmill.runtime.kv_transfer.nixl_transport import NixlTransport
from gristmill.runtime.kv_transfer.peer_carrier import PeerCarrier
from gristmill.runtime.kv_transfer.shared_memory import private_folder
from gristmill.runtime.kv_transfer.table import SUFFIX, PeerTable
from gristmill.runtime.kv_transfer.transport import MappedTransport, Transport
from gristmill.runtime.scheduler import Scheduler

WHERE = "the store 'device:NAME[:nixl]'"
TRANSPORTS: dict[str, Callable[[Sequence[torch.Tensor]], Transport]] = {
    "": MappedTransport,
    "nixl": NixlTransport,
}


@dataclass(frozen=True, slots=True)
class DevicePool:
    """As `CachePool`: the processes whose tables are in a folder. `transport` is the name of one of `TRANSPORTS`."""

    folder: Path
    transport: str = ""

    def carrier(
        self,
        cache: PagedCache,
        device: torch.device,
        scheduler: Scheduler,
        root: bytes,
        policy: Policy | None = None,
    ) -> PeerCarrier:
        """As `CachePool.carrier`."""
        if isinstance(cache, ExternalCache):
            raise UsageError(f"{WHERE}: other processes cannot map a cache that the engine did not allocate")
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # it is no table: who finds it says so
                table = PeerTable(path)
                table.alive()  # removes what a process that has ended has left
                table.close()
        try:
            return PeerCarrier(
                self.folder, cache, device, scheduler, root, TRANSPORTS[self.transport], policy
            )
        except OSError as error:
            raise UsageError(f"{WHERE}: {error}") from error


def open_pool(argument: str) -> DevicePool:
    """From ``NAME[:nixl]``: processes of this user and host with the same name find each other's blocks.

    Raises:
        UsageError: no name of letters, digits, ``_`` and ``-``, another transport, or a folder of this name that others may write.
    """
    name, _, transport = argument.partition(":")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or transport not in TRANSPORTS:
        raise UsageError(
            f"{WHERE}: expected a name of letters, digits, _ and -, and nothing or nixl after it, got {argument!r}"
        )
    return DevicePool(private_folder(name, WHERE), transport)


STORE = StoreSpec(
    name="device",
    summary="device:NAME[:nixl], the caches of processes of this host, which read them from each other",
    open=open_pool,
    caches=True,
)
