"""Pooling over two ranks on this CPU, with gloo: the results of one process, and ranks that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.runtime.errors import RankError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.pooling.parallel_engine import ParallelPoolingEngine
from tests.runtime.pooling.encoder_cases import build, ids, text, write_tokenizer
from tests.runtime.pooling.test_decoders import qwen
from tests.runtime.proofs import proves

LENGTHS = (40, 1, 130, 7)
TEXTS = [ids(length, length) for length in LENGTHS]
CASES = {
    "modernbert": "ModernBertModel",
    "mpnet classifier": "MPNetForSequenceClassification",
    "qwen": "Qwen3ForCausalLM",
}
"""Layers without biases; with them, a bias of positions and a head; a decoder, two of whose query heads share one of keys and values."""


def near(found: list[Any], expected: list[Any]) -> bool:
    """Whether results are the same within the rounding of sums in another order."""
    return all(float(np.abs(one - other).max()) < 1e-5 for one, other in zip(found, expected, strict=True))


def engine_of(llm: LLM) -> ParallelPoolingEngine:
    engine = llm.pooling.engine
    assert isinstance(engine, ParallelPoolingEngine)
    return engine


@proves("ranks", "2", CASES)
@pytest.mark.parametrize("name", CASES)
def test_results_of_one_process(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    if name == "qwen":
        qwen("ForCausalLM", tmp_path)
    else:
        build(name, tmp_path)
    task = "embed" if name == "qwen" else "auto"

    def results(llm: LLM) -> list[Any]:
        if "classifier" in name:
            return [one.values for one in llm.classify(TEXTS)]
        return [one.vector for one in llm.embed(TEXTS)]

    alone = make(tmp_path, task=task)
    ranks = make(tmp_path, task=task, tensor_parallel=2, rank_timeout=60)
    try:
        expected, found = results(alone), results(ranks)
        assert near(found, expected)
        assert not near(found[1:] + found[:1], expected)  # the check tells texts apart
        assert "all_reduce" in " ".join(row["op"] for row in ranks.explain())
        # Embeddings of tokens and positions are on both ranks, or divided; layers are divided.
        assert alone.weight_bytes <= ranks.weight_bytes < 2 * alone.weight_bytes
    finally:
        ranks.close()


@proves("ranks", "2", "BertModel")
def test_a_rank_that_dies(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Ends the batch with an error that names it; the next call starts the ranks again. Warm-up runs on all of them."""
    build("bert", tmp_path)
    write_tokenizer(tmp_path)
    llm = make(tmp_path, tensor_parallel=2, rank_timeout=60, warm="auto", max_batch_tokens=64)
    (known,) = make(tmp_path).embed(text(3))
    try:
        (found,) = llm.embed(text(3))
        assert near([found.vector], [known.vector])
        os.kill(engine_of(llm).ranks._processes[1].process.pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 died"):
            llm.embed(text(3))
        (found,) = llm.embed(text(3))
        assert near([found.vector], [known.vector])
        processes = [process.process.pid for process in engine_of(llm).ranks._processes]
    finally:
        llm.close()
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_is_refused(make: Callable[..., LLM], tmp_path: Path) -> None:
    build("bert", tmp_path)
    with pytest.raises(UsageError, match="cannot be shared by 3 ranks"):
        make(tmp_path, tensor_parallel=3)
    with pytest.raises(UsageError, match="rank_timeout"):
        make(tmp_path, tensor_parallel=2, rank_timeout=0)
