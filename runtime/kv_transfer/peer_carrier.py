"""Blocks from the cache of one process to that of another, without a copy in between.

A process that computes blocks publishes their keys and digests in its `table`, and lends them for `LEASE` seconds, or until a reader says that it
has them; they can be found for as long as its cache holds them. A reader copies blocks into its own cache by itself, the owner's engine does
nothing for it. It then computes their digests: blocks that were overwritten meanwhile, or belong to another prompt, have others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.kv_transfer.carrier import Found, Received, all_places, longest, needed, wanted_keys
from gristmill.runtime.kv_transfer.digests import BlockDigests
from gristmill.runtime.kv_transfer.layout import Layout, cache_tensors
from gristmill.runtime.kv_transfer.peer_memory import PeerMemoryError
from gristmill.runtime.kv_transfer.scattered import ScatteredBlocks
from gristmill.runtime.kv_transfer.table import SUFFIX, OwnTable, PeerTable
from gristmill.runtime.kv_transfer.transport import Source, Transport
from gristmill.runtime.scheduler import Scheduler
from gristmill.runtime.steps_in_flight import StreamEvent

LEASE = 30.0
"""Seconds that blocks which nobody has read stay in the cache after they were published."""
LENT = 0.5
"""The part of a cache that is lent at most; beyond it the blocks that were published first are given back."""

AHEAD = 2
"""Parts that are copied while another one is hashed."""

UNREACHABLE = "the memory of a process cannot be reached"
OVERWRITTEN = "a block was overwritten while it was copied"


@dataclass(slots=True)
class _Where:
    """Where blocks were found: for each the place of its process in `peers` (-1 = nowhere), its block there, and its digest."""

    peers: list[_Peer]
    which: NDArray[np.int64]
    blocks: NDArray[np.int64]
    digests: NDArray[np.int64]

    def __getitem__(self, chosen: Any) -> _Where:
        return _Where(self.peers, self.which[chosen], self.blocks[chosen], self.digests[chosen])


@dataclass(slots=True)
class _Lent:
    """Blocks of this cache that are kept for others; `until` is None before they are published. void: their content is forgotten."""

    blocks: NDArray[np.int64]
    until: float | None = None
    void: bool = False


class PeerCarrier:
    """As `Carrier`, between the caches of processes that meet in a folder, which must be theirs alone.

    Args:
        transport: makes the transport of the tensors of the cache.
        policy: selects the kernel that copies scattered blocks; None = the one that GRISTMILL_POLICY names.

    Raises:
        PeerMemoryError: the cache cannot be reached by others. OSError: the folder cannot be used. NoKernelError: no kernel copies scattered
            blocks here under the policy.
    """

    stages = False
    sends_preempted = False  # nobody else has room for them

    def __init__(
        self,
        folder: Path,
        cache: PagedCache,
        device: torch.device,
        scheduler: Scheduler,
        root: bytes,
        transport: Callable[[Sequence[torch.Tensor]], Transport],
        policy: Policy | None = None,
    ) -> None:
        self._policy = policy
        self._folder, self._cache, self._device = folder, cache, device
        self._scheduler, self._root, self._make_transport = scheduler, root, transport
        self._peers: dict[str, _Peer] = {}  # by the names of their tables; of the thread that loads
        self._unreachable: set[str] = set()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()  # of what follows
        self._lent: list[_Lent] = []
        self._keys: dict[int, bytes] = {}  # of published blocks
        self._forgotten: list[bytes] = []
        self._table = OwnTable(folder, scheduler.pool.num_blocks)
        try:
            self.wake_up()
        except BaseException:
            self._table.close()
            raise
        self.block_bytes = self._digests.block_bytes
        if scheduler.cache is not None:
            scheduler.cache.on_forget = self._forget

    # Reading -----------------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], first: int, windows: Sequence[int]) -> Found:
        """As `Carrier.find`."""
        found = Found(first, first)
        self._look(found)
        size, groups = self._cache.block_size, len(windows)
        names = wanted_keys(keys, first, groups)
        where = _Where([], *(np.full(len(names), -1, np.int64) for _ in range(3)))
        for peer in self._peers.values():
            if peer.fits:
                blocks = peer.table.find(names)
                new = (blocks >= 0) & (where.which < 0)
                where.which[new], where.blocks[new] = len(where.peers), blocks[new]
                where.digests[new] = peer.table.digests(blocks[new])
                where.peers.append(peer)
        there = where.which >= 0
        found.length = len(keys)
        if not there.all():
            has = dict(zip(all_places(first, len(keys), groups), there.tolist(), strict=True))
            found.length = longest(has, first, len(keys), windows, size)
            found.missing = [names[place] for place in (~there).nonzero()[0]]
        found.places = needed(first, found.length, windows, size)
        if len(found.places) == len(names):  # in the same order
            found.content = where if names else None
        elif found.places:
            found.content = where[[(index - first) * groups + group for index, group in found.places]]
        return found

    def receive(self, found: Found, skip: int, blocks: Sequence[int]) -> Callable[[], Received]:
        """As `Carrier.receive`."""
        return partial(self._fetch, found.content[skip:], np.asarray(blocks, np.int64), self._event())

    def _fetch(self, where: _Where, blocks: NDArray[np.int64], after: StreamEvent | None) -> Received:
        """Copy blocks, and check them."""
        sources: dict[int, Source] = {}
        for which in np.unique(where.which).tolist():
            peer = where.peers[which]
            try:
                sources[which] = peer.connect(self._transport)
            except PeerMemoryError as error:
                self._unreachable.add(peer.table.name)
                self._peers.pop(peer.table.name, peer).close()
                return Received(0, [(UNREACHABLE, f"{peer.table.name}: {error}")])
        try:
            digests = self._copy(where, blocks, sources, after)
        except BaseException:
            if self._stream is not None:
                self._stream.synchronize()
            for which in sources:  # nothing may be written to the blocks any more: they are given back
                where.peers[which].disconnect()
            raise
        right = digests == where.digests
        for which in sources:
            where.peers[which].table.acknowledge(where.blocks[right & (where.which == which)])
        wrong = (~right).nonzero()[0]
        if not len(wrong):
            return Received(len(blocks))
        return Received(int(wrong[0]), [(OVERWRITTEN, f"{len(wrong)} of {len(blocks)} blocks")])

    def _copy(
        self,
        where: _Where,
        blocks: NDArray[np.int64],
        sources: Mapping[int, Source],
        after: StreamEvent | None,
    ) -> NDArray[np.int64]:
        """Copy blocks, and compute their digests: of scattered ones in the same launches, else of a part while the next ones are copied."""
        planes = self._planes(where, blocks, sources)
        if planes is not None:
            return self._copy_scattered(where, blocks, planes, after)
        with self._on_stream():
            sums = self._digests.sums(len(blocks))
            under_way = deque[tuple[slice, list[Callable[[], None]]]]()
            for part in self._digests.parts(len(blocks)):
                under_way.append((part, self._start(where[part], blocks[part], sources, after)))
                if len(under_way) > AHEAD:
                    self._finish(*under_way.popleft(), sums, blocks)
            while under_way:
                self._finish(*under_way.popleft(), sums, blocks)
            digests: NDArray[np.int64] = self._digests.digests(sums).cpu().numpy()
            return digests

    def _planes(
        self, where: _Where, blocks: NDArray[np.int64], sources: Mapping[int, Source]
    ) -> dict[int, list[torch.Tensor]] | None:
        """The memory of processes whose blocks are scattered, here or there, if kernels can read it; else None."""
        if self._scattered is None or not self._scattered.are(blocks, where.blocks):
            return None
        planes = {which: source.planes(where.peers[which].layout) for which, source in sources.items()}
        found = {which: tensors for which, tensors in planes.items() if tensors is not None}
        return found if len(found) == len(planes) else None

    def _copy_scattered(
        self,
        where: _Where,
        blocks: NDArray[np.int64],
        planes: Mapping[int, Sequence[torch.Tensor]],
        after: StreamEvent | None,
    ) -> NDArray[np.int64]:
        assert self._scattered is not None
        with self._on_stream(after):
            sums = self._digests.sums(len(blocks))
            for which, tensors in planes.items():
                mine = (where.which == which).nonzero()[0]
                copied = self._scattered.copy(tensors, where.blocks[mine], blocks[mine])
                sums.index_copy_(1, torch.from_numpy(mine).to(sums.device), copied)
            digests: NDArray[np.int64] = self._digests.digests(sums).cpu().numpy()
            return digests

    def _start(
        self,
        where: _Where,
        blocks: NDArray[np.int64],
        sources: Mapping[int, Source],
        after: StreamEvent | None,
    ) -> list[Callable[[], None]]:
        """Begin to copy the blocks of a part; what waits for that."""
        begun = []
        for which, source in sources.items():
            mine, layout = where.which == which, where.peers[which].layout
            copies = self._layout.copies(
                self._addresses,
                blocks[mine].tolist(),
                layout,
                source.addresses,
                where.blocks[mine].tolist(),
            )
            begun.append(source.start(list(copies), after))
        return begun

    def _finish(
        self, part: slice, begun: Sequence[Callable[[], None]], sums: torch.Tensor, blocks: NDArray[np.int64]
    ) -> None:
        """Hash the blocks of a part, when they have been copied."""
        for wait in begun:
            wait()
        self._digests.add(sums, part, blocks[part].tolist())

    def _look(self, found: Found) -> None:
        """Find out which processes there are, and what they have."""
        names = {path.stem for path in self._folder.glob(f"*{SUFFIX}")} - {self._table.name}
        for name in [name for name in self._peers if name not in names]:
            self._peers.pop(name).close()
        for name in sorted(names - self._peers.keys() - self._unreachable):
            try:
                self._peers[name] = _Peer(PeerTable(self._folder / f"{name}{SUFFIX}"))
            except FileNotFoundError:  # its owner has just ended
                continue
            except OSError as error:
                self._give_up(name, error, found)
        for name, peer in list(self._peers.items()):
            if not peer.table.alive():
                self._peers.pop(name).close()
                continue
            try:
                peer.refresh(self._root, self._layout, self._transport)
            except (OSError, ValueError) as error:
                self._peers.pop(name).close()
                self._give_up(name, error, found)

    def _give_up(self, name: str, error: Exception, found: Found) -> None:
        self._unreachable.add(name)
        found.failures.append((UNREACHABLE, f"{name}: {error}"))

    # Publishing --------------------------------------------------------------------------------------------------------

    def send(self, keys: Sequence[bytes], blocks: Sequence[int]) -> Callable[[], int]:
        """As `Carrier.send`."""
        lent = _Lent(np.asarray(blocks, np.int64))
        for block in blocks:
            self._scheduler.pool.share(block)
        self._scheduler.lend(blocks)
        self._lent.append(lent)
        return partial(self._publish, lent, list(keys), self._event())

    def _publish(self, lent: _Lent, keys: list[bytes], after: StreamEvent | None) -> int:
        blocks = lent.blocks.tolist()
        try:
            with self._on_stream(after):
                digests = self._digests.of(blocks).cpu().numpy()
            with self._lock:
                if not lent.void:
                    self._table.publish(blocks, keys, digests)
                    self._keys.update(zip(blocks, keys, strict=True))
            return 0 if lent.void else len(keys)
        except BaseException:
            lent.void = True
            raise
        finally:
            lent.until = time.monotonic() + LEASE

    def collect(self) -> list[bytes]:
        """As `Carrier.collect`."""
        now, most = time.monotonic(), int(LENT * self._scheduler.pool.num_blocks)
        beyond = sum(len(lent.blocks) for lent in self._lent) - most
        for lent in self._lent:
            if lent.until is None:
                continue
            if lent.void or now >= lent.until or beyond > 0:
                done = np.ones(len(lent.blocks), bool)
            else:
                done = self._table.were_read(lent.blocks)
            if done.any():
                beyond -= int(done.sum())
                self._scheduler.give_back(lent.blocks[done].tolist())
                lent.blocks = lent.blocks[~done]
        self._lent = [lent for lent in self._lent if len(lent.blocks)]
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _forget(self, blocks: Iterable[int]) -> None:
        """As `PrefixCache.on_forget`."""
        gone = frozenset(blocks)
        with self._lock:
            self._table.withdraw(gone)
            self._forgotten += (self._keys.pop(block) for block in gone & self._keys.keys())
            if not gone.isdisjoint(
                self._scheduler.lent
            ):  # eviction, which is often, leaves lent blocks alone
                for lent in self._lent:
                    lent.void = lent.void or not gone.isdisjoint(lent.blocks.tolist())

    # The cache ---------------------------------------------------------------------------------------------------------

    def new_root(self, root: bytes) -> None:
        """As `Carrier.new_root`."""
        self._root = root
        self._describe()

    def sleep(self) -> None:
        """As `Carrier.sleep`."""
        self._table.clear()
        self._table.describe({})
        self._transport.close()

    def wake_up(self) -> None:
        """As `Carrier.wake_up`."""
        tensors = cache_tensors(self._cache)
        self._layout, self._addresses = Layout.of(tensors), [tensor.data_ptr() for tensor in tensors]
        self._digests = BlockDigests(tensors)
        self._scattered: ScatteredBlocks | None = None
        if ScatteredBlocks.takes(tensors):
            self._scattered = ScatteredBlocks(tensors, self._digests, self._policy)
        self._transport = self._make_transport(tensors)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what digests multiply by is used on another stream
        self._describe()

    def close(self) -> None:
        """As `Carrier.close`."""
        self._table.close()
        self._transport.close()

    def _describe(self) -> None:
        self._table.describe(
            {
                "root": self._root.hex(),
                "planes": self._layout.plain(),
                "transport": self._transport.name,
                "memory": self._transport.export(),
            }
        )

    def _event(self) -> StreamEvent | None:
        """What comes after all steps that were launched; None where they have ended."""
        if self._stream is None:
            return None
        event = StreamEvent(self._device)
        event.record()
        return event

    @contextmanager
    def _on_stream(self, after: StreamEvent | None = None) -> Iterator[None]:
        """The current stream of the thread is the one of digests, after an event."""
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                if after is not None:
                    after.delay(self._stream)
                yield


class _Peer:
    """Another process: its table, and its memory once it is needed."""

    def __init__(self, table: PeerTable) -> None:
        self.table = table
        self.layout = Layout((), 0)
        self.fits = False
        self._described: Mapping[str, Any] = {}
        self._source: Source | None = None

    def refresh(self, root: bytes, layout: Layout, transport: Transport) -> None:
        """Read its table. It has nothing if its blocks are others than those of this process. PeerMemoryError: what it says is damaged."""
        self.table.refresh()
        described = self.table.description
        if described == self._described:
            return
        self.disconnect()
        self._described = described
        self.fits = described.get("root") == root.hex() and described.get("transport") == transport.name
        if not self.fits:
            return
        self.layout = Layout.parse(described.get("planes"), self.table.blocks)
        if not layout.has_parts_of(self.layout):
            raise PeerMemoryError("blocks of the same model have other parts there")

    def connect(self, transport: Transport) -> Source:
        """Its memory. PeerMemoryError: it cannot be reached, or is smaller than it is said to be."""
        if self._source is None:
            told = self._described.get("memory")
            if not isinstance(told, list) or not all(isinstance(one, dict) for one in told):
                raise PeerMemoryError(f"memory is a list of objects, got {told!r}")
            if len(told) != len(self.layout.planes):
                raise PeerMemoryError(f"{len(told)} tensors for {len(self.layout.planes)} planes")
            source = transport.connect(told)
            try:
                self.layout.check(source.sizes)
            except PeerMemoryError:
                source.close()
                raise
            self._source = source
        return self._source

    def disconnect(self) -> None:
        """Give its memory back."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def close(self) -> None:
        """Give everything back."""
        self.disconnect()
        self.table.close()
