"""Poison for the blocks of a KV cache that no request may read."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.runtime.llm import LLM


def poison(llm: LLM) -> None:
    """From now on, before each step, blocks that nobody owns and no prefix names hold NaN."""
    engine, runner = llm.engine, llm.engine.runner
    launch = runner.launch

    def poisoned(*args: Any) -> Any:
        pool = engine.scheduler.pool
        free = [b for b in range(pool.num_blocks) if not pool.refs[b] and pool.content[b] is None]
        runner.cache.storage[:, :, free] = torch.nan
        return launch(*args)

    runner.launch = poisoned  # type: ignore[method-assign, union-attr]
