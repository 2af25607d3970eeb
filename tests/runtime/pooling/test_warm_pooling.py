"""Warm-up of models for pooling: no kernel is selected while requests wait."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.runtime.llm import LLM
from tests.runtime.pooling.encoder_cases import build, ids, write_modules


@pytest.mark.parametrize("name", ["modernbert", "mpnet", "bert classifier"])
def test_every_batch_is_prepared(name: str, make_apart: Callable[..., LLM], tmp_path: Path) -> None:
    """Also those of many short sequences, which a head has as rows."""
    build(name, tmp_path)
    classifies = "classifier" in name
    if not classifies:
        write_modules(tmp_path, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True})
    llm = make_apart(tmp_path, warm="auto", max_batch_tokens=100)
    engine = llm.pooling.engine
    assert engine.status().late_kernels == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for lengths in ((1,), (2, 7), (engine.max_length,), (40, 40, 20), (100,), (1,) * 100):
            texts = [ids(length) for length in lengths]
            assert len(llm.classify(texts) if classifies else llm.embed(texts)) == len(texts)
    assert engine.status().late_kernels == 0
    cold = make_apart(tmp_path, warm="off")
    entries = [entry for plan in cold.pooling.engine.model.plans.bound.values() for entry in plan.entries]
    assert not any(entries)
