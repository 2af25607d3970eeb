"""Rows of `integrations.ray.Generate`, which needs no Ray where it runs: arrays as prompts, and why a row has no completion."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.integrations.ray.batch import Generate
from gristmill.runtime.errors import UsageError
from tests.runtime.oracle import LLAMA, MODELS

OPTIONS = {"dtype": "fp32", "num_blocks": 64, "device": "cpu"}


@pytest.fixture
def policy(tmp_path: Path, policy_file: Any) -> None:
    policy_file()


def completed(generate: Generate, prompts: list[Any]) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        try:
            return await generate({"prompt": prompts})
        finally:
            await generate.engine.close()

    return asyncio.run(run())


def test_arrays_and_refused_rows(policy: None) -> None:
    generate = Generate(str(MODELS / LLAMA), {"max_tokens": 3}, on_error="column", options=OPTIONS)
    ids = np.array([262, 1181])
    rows = completed(generate, [ids, ids.tolist(), ids.astype(np.float32), np.array([], dtype=np.int64)])
    first, second, *refused = rows["error"]
    assert (first, second) == (None, None)
    assert rows["generated_ids"][0] == rows["generated_ids"][1] and len(rows["generated_ids"][0]) == 3
    assert "which are integers, got 262.0" in refused[0] and "prompt is empty" in refused[1]
    assert rows["finish_reason"][2:] == ["error", "error"]


def test_a_row_that_fails_has_its_cause(policy: None) -> None:
    params = {"max_tokens": 3, "bad_words": [[5]], "allowed_token_ids": [5]}
    generate = Generate(str(MODELS / LLAMA), params, on_error="column", options=OPTIONS)
    rows = completed(generate, [[262, 1181]])
    assert rows["finish_reason"] == ["error"]
    assert rows["error"] == [
        "no_token_allowed: allowed_token_ids and bad_words allow no token after 0 tokens of output"
    ]


def test_a_refused_row_ends_the_job_by_default(policy: None) -> None:
    generate = Generate(str(MODELS / LLAMA), {"max_tokens": 3}, options=OPTIONS)
    with pytest.raises(UsageError, match="prompt is empty"):
        completed(generate, [[]])
