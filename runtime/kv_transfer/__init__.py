"""Blocks of the KV cache outside the engine: in host memory, in files, in memory that processes share.

A store is one file of this package that declares `STORE`. It keeps records (`records`) under keys (`identity`) and knows nothing of models;
what it returns is checked before it is used. `transfer` moves blocks between the paged cache and a store.

Packages outside this tree declare stores under the entry point group ``gristmill.kv_stores``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gristmill.kernel_registry.declarations import Declarations, find_declarations
from gristmill.kernel_registry.plugins import PluginFailure
from gristmill.runtime.errors import UsageError

if TYPE_CHECKING:
    import torch

    from gristmill.kernel_registry.policy import Policy
    from gristmill.runtime.kv_cache.paged import PagedCache
    from gristmill.runtime.kv_transfer.carrier import Carrier
    from gristmill.runtime.scheduler import Scheduler

ENTRY_POINTS = "gristmill.kv_stores"


class Store(Protocol):
    """Records under keys of 32 bytes. Several threads call any of these methods at once.

    A record that is not there any more, damaged, or of another size is no error of the engine: its tokens are computed. OSError of any
    method counts as a failure of the store, and the call as unanswered.
    """

    def matched(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether there seems to be a record."""
        ...

    def load(self, key: bytes, into: memoryview) -> int:
        """Read a record to the front of `into`. Returns its bytes; 0 = there is none. One that is larger than `into` is not read."""
        ...

    def save(self, key: bytes, record: memoryview) -> None:
        """Keep a copy of a record; it may drop others for it. Readers see the whole record or none."""
        ...

    def drop(self, key: bytes) -> None:
        """Forget a record, if there is one: it was damaged."""
        ...

    def close(self) -> None:
        """Give back what belongs to this process."""
        ...


@runtime_checkable
class CachePool(Protocol):
    """Processes that read blocks in each other's caches, without a store that has copies."""

    def carrier(
        self,
        cache: PagedCache,
        device: torch.device,
        scheduler: Scheduler,
        root: bytes,
        policy: Policy | None = None,
    ) -> Carrier:
        """What carries blocks between a cache and those of the others, by kernels that the policy selects; UsageError if the cache cannot be reached
        by them."""
        ...


@dataclass(frozen=True)
class StoreSpec:
    """A kind of store.

    Attributes:
        name: what stands before the colon in ``NAME[:ARGUMENT]``.
        summary: one line for users.
        open: makes a store from the argument, "" if there is none; raises UsageError for an argument that it does not take.
        caches: whether that is a `CachePool`.
    """

    name: str
    summary: str
    open: Callable[[str], Store | CachePool]
    caches: bool = False


@cache
def _declared() -> Declarations[StoreSpec]:
    return find_declarations(__name__, "STORE", StoreSpec, ENTRY_POINTS, lambda spec: [spec.name])


def stores() -> Mapping[str, StoreSpec]:
    """All kinds of stores by name, including those of plugins."""
    return _declared().by_name


def failures() -> tuple[PluginFailure, ...]:
    """Plugins of ``gristmill.kv_stores`` that failed to load, with reasons."""
    return _declared().failures


UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_bytes(text: str, where: str) -> int:
    """``4GiB``, ``512MiB`` or a number of bytes; UsageError, with `where`, for anything else."""
    found = re.fullmatch(r"(\d+)(|[KMGT]iB)", text)
    if found is None or int(found[1]) < 1:
        raise UsageError(f"{where}: expected bytes, such as 4GiB or 512MiB, got {text!r}")
    return int(found[1]) * UNITS[found[2]]
