"""An engine that nobody holds is gone without a garbage collection, and what is alive after a warm-up is left out of collections."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # noqa: F401  # torch imports it in the first call of an operator, whose frames it keeps until a collection

from gristmill import LLM, SamplingParams
from gristmill.runtime import engine
from gristmill.runtime.engine_memory import freeze_before_load, freeze_heap
from tests.runtime.oracle import LLAMA, MODELS


class Owner:
    """Something alive."""


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And none here: each would take seconds, over all that the tests of this process have made. A warm-up freezes the heap here alone."""
    monkeypatch.setattr(engine, "freeze_heap", freeze_heap)
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.freeze()  # as tests/conftest.py had


def test_an_engine_goes_with_its_last_reference() -> None:
    llm = LLM(MODELS / LLAMA, max_seqs=4, max_model_len=64, warm="off")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    parts = [weakref.ref(part) for part in (llm.engine, llm.engine.runner, llm.model, llm.engine.scheduler)]
    del llm
    assert [part() for part in parts] == [None] * 4


def test_a_warm_up_freezes_the_heap_until_the_engine_is_gone() -> None:
    llm = LLM(MODELS / LLAMA, max_seqs=4, max_model_len=64, warm="off")
    llm.engine.warm_up()
    assert gc.get_freeze_count() > 10_000
    model = weakref.ref(llm.model)
    del llm
    assert model() is None and gc.get_freeze_count() == 0


@pytest.mark.parametrize("planted", [False, True], ids=["once", "planted: a collection of all"])
def test_a_load_onto_a_device_collects_nothing_that_was_there_before(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collections of a load leave it out, and so does the one that precedes the last freeze; all of it is thawed with the engine."""
    monkeypatch.setattr(engine, "has_device", lambda: True)
    monkeypatch.setattr(engine, "forked_workers", nullcontext)
    if planted:
        monkeypatch.setattr(engine, "freeze_before_load", lambda owner: None)
    old = Owner()
    old.itself = old  # type: ignore[attr-defined]
    seen = weakref.ref(old)
    del old
    llm = LLM(MODELS / LLAMA, max_seqs=4, max_model_len=64, device="auto")
    gc.collect()  # as the program, or a load that makes many objects
    assert (seen() is None) == planted
    llm.engine.warm_up()
    assert gc.get_freeze_count() > 10_000
    del llm
    gc.collect()
    assert seen() is None and gc.get_freeze_count() == 0


@pytest.mark.parametrize(("count", "thaws"), [(375, True), (100_000, False)])
def test_what_python_freezes_as_it_starts_is_nobodys(
    count: int, thaws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 freezes a few hundred objects."""
    real = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count)
    owner = Owner()
    freeze_before_load(owner)
    assert (real() > 10_000) == thaws
    freeze_heap(owner)
    assert real() > 10_000
    del owner
    assert (real() == 0) == thaws


def test_nothing_is_frozen_early_beside_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    freeze_before_load(Owner())
    assert gc.get_freeze_count() == 0
    monkeypatch.undo()
    gc.freeze()
    owner = Owner()
    freeze_before_load(owner)
    del owner
    assert gc.get_freeze_count() > 0, "what the program froze"


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    frozen, owner = gc.get_freeze_count(), Owner()
    freeze_heap(owner)
    del owner
    assert gc.get_freeze_count() >= frozen > 0


def test_garbage_is_collected_before_and_an_owner_in_a_cycle_stays() -> None:
    garbage = Owner()
    garbage.itself = garbage  # type: ignore[attr-defined]
    seen, owner = weakref.ref(garbage), Owner()
    del garbage
    freeze_heap(owner)
    assert seen() is None
    owner.itself = owner  # type: ignore[attr-defined]
    del owner
    gc.collect()
    assert gc.get_freeze_count() > 0, "a cycle through the owner would never be freed: engines must have none"
