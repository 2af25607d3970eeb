"""Kernels are verified while weights are read: the warm-up finds their records. No child process: verifications are counted, and succeed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.autotune.worker import Worker
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.runtime import engine_loading, verify_ahead
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.models import llama
from gristmill.runtime.runner import Runner
from gristmill.runtime.verify_ahead import WORKER_BYTES, VerifiedAhead, linear_problems, workers_for
from tests.runtime.oracle import DEEPSEEK, LLAMA

LIMITS = {"num_blocks": 40, "max_batch_tokens": 64, "max_seqs": 4, "max_model_len": 200}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(operation, name of the thread) of each verification."""
    found: list[tuple[str, str]] = []

    def verify(self: Worker, op: Op, *task: object) -> dict[str, Any]:
        found.append((op.name, threading.current_thread().name))
        return {"ok": True, "error": 0.0, "tolerance": 0.0, "reason": "", "judged": True}

    monkeypatch.setattr(Worker, "verify", verify)
    monkeypatch.setattr(verify_ahead, "workers_for", lambda device, most=8: 2)
    return found


@pytest.mark.parametrize("planted", [False, True], ids=["ahead", "planted: nothing ahead"])
def test_most_is_verified_while_weights_are_read(
    planted: bool,
    make: Callable[..., LLM],
    policy: Policy,
    tmp_path: Path,
    tried: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last layer waits for it here, as a slow disk would."""
    if planted:
        monkeypatch.setattr(VerifiedAhead, "start", lambda *arguments: None)
    made, weights_read = llama.load_norm, list[int]()

    def slow(plans: Any, weight: Any, *more: Any) -> Any:
        if plans.on_bind is not None and len(plans.owned) > 40:
            pool = plans.on_bind.__self__._pool
            while pool._work_queue.qsize():
                threading.Event().wait(0.01)
            weights_read[:] = [len(tried)]
        return made(plans, weight, *more)

    monkeypatch.setattr(llama, "load_norm", slow)
    own = replace(policy, cache=str(tmp_path), weight_memory=1.07)
    engine = make(LLAMA, warm="auto", policy=own, **LIMITS).engine
    report = engine.warmed
    assert report is not None and len(tried) > 20 and (report.verified == len(tried)) != planted
    early = weights_read[0] if weights_read else 0
    assert early > 0.7 * len(tried) if not planted else early == 0
    names = {op for op, _ in tried[:early]}
    assert planted or {"linear", "sample", "paged_attention", "qk_norm_rope_cache"} <= names
    assert engine.runner.model.plans.resolver.workers.limit == 1  # type: ignore[union-attr]


def test_the_pool_ends_with_a_load_that_fails(
    make: Callable[..., LLM],
    policy: Policy,
    tmp_path: Path,
    tried: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[VerifiedAhead] = []
    start, before = VerifiedAhead.start, set(threading.enumerate())
    monkeypatch.setattr(
        VerifiedAhead, "start", lambda ahead, *rest: (started.append(ahead), start(ahead, *rest))
    )

    def fail(*arguments: object) -> None:
        raise MemoryError("no memory for the cache")

    monkeypatch.setattr(engine_loading, "make_cache", fail)
    with pytest.raises(UsageError, match=r"does not fit in memory .*: no memory for the cache"):
        make(LLAMA, warm="auto", policy=replace(policy, cache=str(tmp_path)), **LIMITS)
    left = set(threading.enumerate()) - before
    assert started[0]._pool is None and not [t for t in left if t.name.startswith("ThreadPool")]
    with pytest.raises(UsageError, match=r"does not fit in memory .*: no memory for the cache"):
        make(LLAMA, warm="off", **LIMITS)
    assert len(started) == 1, "off verifies nothing ahead"


@pytest.mark.parametrize(("name", "quant"), [(LLAMA, None), (LLAMA, "int4_g128"), (DEEPSEEK, None)])
def test_linear_layers_are_known_from_the_table(
    name: str, quant: str | None, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the layers bind them, but for the router, the logits head, and what a family of its own fuses."""
    guessed: list[Any] = []
    monkeypatch.setattr(
        VerifiedAhead,
        "start",
        lambda ahead, plans, config, weights: guessed.extend(linear_problems(plans, weights)),
    )
    runner = make(name, warm="auto", quant=quant, **LIMITS).engine.runner
    assert isinstance(runner, Runner)
    bound = {problem for problem, _ in runner.model.plans.bound if problem.op == "linear"}
    head = {p for p in bound if p["n"] == runner.model.config.vocab_size}
    assert guessed and set(guessed) <= bound if name == DEEPSEEK else set(guessed) == bound - head


def test_memory_of_the_processes_is_no_less_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold on a GPU is free later; if the cache needs it now, they end."""
    gib, free, reserved = 1 << 30, [60 << 30], [2 << 30]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved[0])
    ahead = VerifiedAhead(None, None)
    assert ahead.held_bytes() == 0  # not started
    ahead._plans = SimpleNamespace(device=torch.device("cuda"), on_bind=None)  # type: ignore[assignment]
    ahead._pool, ahead._workers = SimpleNamespace(shutdown=lambda **_: None), 4  # type: ignore[assignment]
    ahead._free, ahead._reserved = free[0], reserved[0]
    free[0], reserved[0] = 45 * gib, 12 * gib  # 10 GiB of weights, and 5 of the processes
    assert ahead.held_bytes() == 5 * gib
    free[0] = 5 * gib  # somebody else has taken 40
    assert ahead.held_bytes() == 4 * WORKER_BYTES
    ahead.make_room(1 * gib)
    assert ahead._pool is not None
    ahead.make_room(4 * gib)
    assert ahead._pool is None and ahead.held_bytes() == 0


def test_processes_are_bounded_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_ahead, "free_bytes", lambda _: 9 << 30)
    monkeypatch.setattr(verify_ahead.os, "sched_getaffinity", lambda _: range(32))
    assert [workers_for(torch.device(kind)) for kind in ("cuda", "cpu")] == [4, 4]
    monkeypatch.setattr(verify_ahead, "free_bytes", lambda _: 900 << 30)
    assert [workers_for(torch.device(kind)) for kind in ("cuda", "cpu")] == [8, 8]
    assert workers_for(torch.device("cuda"), 4) == 4
    monkeypatch.setattr(verify_ahead.os, "sched_getaffinity", lambda _: range(6))
    assert [workers_for(torch.device(kind)) for kind in ("cuda", "cpu")] == [3, 1]
