"""The comparison of transfers between two processes: every case moves all bytes, and one that does not is an error."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from lab import kv_peer


def test_all_cases_move_the_bytes() -> None:
    rows = {row["case"]: row for row in kv_peer.measure("cpu", 7 * kv_peer.TOKEN, 2)}
    assert {"plain", "ipc"} <= set(rows)
    for row in rows.values():
        assert row["bytes"] == 7 * kv_peer.TOKEN and len(row["samples_s"]) == 2 and row["s"] > 0


def test_one_wrong_byte_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kv_peer.ipc_reader

    def planted(told: dict[str, object], into: torch.Tensor):  # type: ignore[no-untyped-def]
        read = real(told, into)

        def wrong() -> None:
            read()
            into[-1] ^= 1

        return wrong

    monkeypatch.setattr(kv_peer, "ipc_reader", planted)
    with pytest.raises(RuntimeError, match="ipc: 1 of 131072 bytes are wrong"):
        kv_peer.measure("cpu", kv_peer.TOKEN, 1)


class PlantedAgent:
    """NIXL's agent for memory of this process: a transfer is copies between descriptors of the same size."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def register_memory(self, memory: torch.Tensor) -> None: ...

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def get_xfer_descs(self, parts: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        assert kind == "DRAM"
        return parts

    def initialize_xfer(self, way: str, here: Any, there: Any, name: str) -> Any:
        assert (way, name) == ("READ", "prefill") and [n for _, n, _ in here] == [n for _, n, _ in there]
        return list(zip(here, there, strict=True))

    def transfer(self, handle: Any) -> None:
        self.descriptors.append(len(handle))
        for (into, size, _), (source, _, _) in handle:
            ctypes.memmove(into, source, size)

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE"


def test_a_read_in_several_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 bytes in 1, 3 and 999 parts: sizes that do not divide, and fewer parts than asked for where bytes are left over."""
    agent = PlantedAgent()
    monkeypatch.setattr(kv_peer, "_agent", lambda name: agent)
    source, into = torch.arange(1000).byte(), torch.zeros(1000, dtype=torch.uint8)
    told = {"nixl": (b"prefill", source.data_ptr(), 0)}
    for case, read in kv_peer.nixl_readers(told, into, (1, 3, 999)).items():
        into.zero_()
        read()
        assert torch.equal(into, source), case
    assert agent.descriptors == [1, 3, 500]
