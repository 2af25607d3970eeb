"""Models for the tests, with one store of verifications for the whole run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel import child_process
from tests.forked import forked_children
from tests.heap_is_frozen import heap_is_frozen  # noqa: F401
from tests.runtime import kernel_sets
from tests.runtime.engines import maker, run_policy


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:
    with forked_children():
        yield


@pytest.fixture
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of the runtime are processes that begin with their own interpreter, as they are for users."""
    monkeypatch.setattr(child_process, "subprocess", subprocess)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The default policy, with the cache of this run."""
    return run_policy(tmp_path_factory)


@pytest.fixture(scope="session")
def make(policy: Policy) -> Callable[..., LLM]:
    """Makes an LLM of an example model or of any directory on the CPU, as `maker` says."""
    return maker(policy, "cpu")


@pytest.fixture(scope="session")
def make_apart(make: Callable[..., LLM], policy: Policy) -> Callable[..., LLM]:
    """Like `make`; no other model has the plans of this one: for tests that count selections, or replace what they select."""

    def build(name: str | Path, **options: Any) -> LLM:
        return make(name, **{"policy": replace(policy), **options})

    return build


@pytest.fixture(scope="session")
def make_plain(make: Callable[..., LLM]) -> Callable[..., LLM]:
    """Like `make`, kernel by kernel: what a test plants in Python is not called by the record of a step, which a CPU has by default."""
    return partial(make, decode_graphs=False)


@pytest.fixture(scope="session")
def shared(make: Callable[..., LLM]) -> Callable[..., LLM]:
    """Like `make`, with one LLM per model and options: for tests that do not change it."""
    models: dict[tuple[Any, ...], LLM] = {}

    def get(name: str, **options: Any) -> LLM:
        key = (name, *sorted(options.items()))
        if key not in models:
            models[key] = make(name, **options)
        return models[key]

    return get


@pytest.fixture(scope="session")
def make_strict(make: Callable[..., LLM], policy: Policy) -> Callable[..., LLM]:
    """Like `make`, restricted to one set of `tests.runtime.kernel_sets`."""

    def build(name: str | Path, kernel_set: str, **options: Any) -> LLM:
        return make(name, policy=kernel_sets.strict(kernel_set, policy), **options)

    return build
