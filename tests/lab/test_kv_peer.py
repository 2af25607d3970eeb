"""The comparison of transfers between two processes: every case moves all bytes, and one that does not is an error."""

from __future__ import annotations

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
