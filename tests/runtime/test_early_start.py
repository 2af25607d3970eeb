"""What a load begins beside its first steps: in a thread that is gone afterwards, and whose failures are those of the load."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from gristmill import LLM
from gristmill.autotune.compilations import CACHE_VARIABLE
from gristmill.kernel_registry.policy import Policy
from gristmill.runtime import early_start, engine
from gristmill.runtime.early_start import started_early
from tests.runtime.oracle import LLAMA, MODELS


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called, of a driver that is not there."""
    found: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *arguments, **named: found.append(" ".join([name, *arguments, *named.values()]))

    monkeypatch.setattr(early_start, "probe_cuda", note("driver"))
    monkeypatch.setattr(torch.cuda, "init", note("torch"))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: found.append(f"context {device}"))
    monkeypatch.setattr(early_start, "prepare_triton", note("triton"))
    return found


@pytest.mark.parametrize(
    ("device", "context"),
    [("auto", []), ("cuda", ["context cuda"]), (torch.device("cuda", 1), ["context cuda:1"])],
)
def test_a_context_is_made_on_a_device_that_is_known(
    device: str | torch.device, context: list[str], called: list[str]
) -> None:
    with started_early(device, None):
        pass
    assert sorted(called) == [*context, "driver", "torch", "triton"]


def test_the_block_does_not_wait_and_outlives_the_thread(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, before = threading.Event(), threading.active_count()
    monkeypatch.setattr(torch.cuda, "init", go.wait)
    with started_early("auto", None):
        assert threading.active_count() > before
        go.set()
    assert threading.active_count() == before and sorted(called) == ["driver", "triton"]


def test_what_triton_compiles_there_is_kept_where_the_policy_says(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(early_start, "prepare_triton", lambda: folders.append(os.environ[CACHE_VARIABLE]))
    with started_early("cuda", Policy(cache="/planted")):
        pass
    assert folders == ["/planted/triton"]


def test_failures_are_silent_here(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.cuda, "init", fail)
    with started_early("cuda", None):
        pass
    assert sorted(called) == ["driver", "triton"], "Triton does not depend on it"
    with pytest.raises(KeyError, match="planted"), started_early("cuda", None):
        raise KeyError("planted")
    assert not [thread for thread in threading.enumerate() if "early" in thread.name]


@pytest.mark.parametrize(
    ("options", "has_device", "expected"),
    [
        ({}, True, ["forks", "early auto"]),
        ({}, False, []),
        ({"device": "cpu"}, True, []),
        ({"warm": "off"}, True, []),
    ],
)
def test_a_load_that_warms_up_on_a_device_begins_early(
    options: dict[str, str], has_device: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the fork, which other threads would prevent."""
    begun: list[str] = []

    @contextmanager
    def begin(*what: str) -> Iterator[None]:
        begun.append(" ".join(what))
        yield

    monkeypatch.setattr(engine, "has_device", lambda: has_device)
    monkeypatch.setattr(engine, "freeze_before_load", lambda owner: None)
    monkeypatch.setattr(engine, "forked_workers", lambda: begin("forks"))
    monkeypatch.setattr(engine, "started_early", lambda device, policy: begin("early", device))
    LLM(MODELS / LLAMA, max_seqs=4, max_model_len=64, **options)  # type: ignore[arg-type]
    assert begun == expected
