"""How peers are called, with stand-ins for the libraries: every adapter gives what the operation defines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.peers.__main__ import main
from lab.peers.adapter import Peer, peers
from lab.peers.libraries._fp8 import by_column
from tests.lab import planted_libraries

CALLED = {
    "linear_dense": "cublas",
    "linear_int4": "cublas machete marlin",
    "linear_fp8": "cutedsl cutlass deepgemm scaled_mm",
    "attention_decode": "fa3 fa3_planned fa4 fa4_split flashinfer",
    "attention_prefill": "fa3 fa3_planned fa4 flashinfer",
    "attention_mixed": "fa3 fa3_planned flashinfer",
    "mla_decode": "flashinfer flashmla",
    "mla_prefill": "fa3 fa4 flashinfer",
    "experts_bf16": "vllm",
    "experts_bf16_ep8": "vllm",
    "experts_int4": "marlin",
    "experts_fp8": "vllm",
    "experts_fp8_ep8": "vllm",
    "experts_mxfp4": "marlin_mxfp4 triton_kernels",
    "grouped_bf16": "deepgemm grouped_mm",
    "routing": "vllm",
    "sampling": "flashinfer vllm",
    "add_rms_norm": "flashinfer vllm",
    "rms_norm": "flashinfer vllm",
}
"""Group -> the candidates of peers in its tiny problems, each in one at least."""


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, policy_file) -> dict[str, Peer]:
    """All peers, as if they were installed."""
    policy_file()
    planted_libraries.plant(monkeypatch)
    monkeypatch.setattr(Peer, "absence", "")
    return peers()


def rows(group: str, known: dict[str, Peer], out: Path) -> list[dict[str, Any]]:
    assert main(["--dry", "--groups", group, "--out", str(out)], known) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return found


@pytest.mark.parametrize("group", CALLED)
def test_what_peers_compute(group: str, known: dict[str, Peer], tmp_path: Path) -> None:
    found = rows(group, known, tmp_path / "out.json")
    expected = {*CALLED[group].split()}
    assert {name for row in found for name, *_ in row["candidates"]} & {*expected} == expected
    for row in found:
        assert row["wrong"] == {}
        assert not any("Error" in why for why in row["refused"].values()), row["refused"]
        assert {name for name, *_ in row["candidates"]} - {row["kernel"]} <= expected and row["ratio"] > 0


def test_every_adapter_is_called() -> None:
    assert {name for text in CALLED.values() for name in text.split()} == {
        name for peer in peers().values() for adapter in peer.adapters for name in peer.of(adapter.op)
    }


def test_a_wrong_argument_is_found(
    known: dict[str, Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a window that is one key too long."""
    real = planted_libraries.flash_attn_varlen_func

    def longer(*arguments: Any, window_size: Any, **named: Any) -> torch.Tensor:
        return real(*arguments, window_size=(window_size[0] + (window_size[0] >= 0), window_size[1]), **named)

    interface = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"]
    monkeypatch.setattr(interface, "flash_attn_varlen_func", longer)
    for row in rows("attention_decode", known, tmp_path / "out.json"):
        assert ("fa3" in row["wrong"]) is ("window" in row["problem"]), row


def test_scales_by_column() -> None:
    scales = torch.arange(15.0).view(5, 3)
    found = by_column(scales, 4)
    assert torch.equal(found, scales) and found.stride() == (1, 8)
    assert by_column(scales).stride() == (1, 5)
