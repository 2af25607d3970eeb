"""An engine in an actor of Ray Data. Rows of several batches run in it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from gristmill.integrations.options import engine_options
from gristmill.integrations.ray.params import sampling_params
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.completion import Completion
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.scheduler import RequestTooLarge


class Generate:
    """A callable class for `ray.data.Dataset.map_batches`: completes the prompts of a column.

    Ray Data gives an actor several batches at a time; their rows share the steps of its engine.

    Args:
        model: a directory or a GGUF file, on every node.
        params: arguments of `gristmill.SamplingParams`; n is 1.
        prompt: the column of prompts, each a text or a list of token ids.
        on_error: ``raise``: a prompt that is refused (empty, too long) ends the job. ``column``: its outputs are empty and the
            column ``error`` says why, as it does for a completion that failed; it is None in the other rows.
        options: options of `gristmill.LLM`, such as ``{"quant": "int4_g128"}``.

    Columns that are added: ``generated_text``, ``generated_ids``, ``finish_reason``, and ``error`` where it was asked for.

    Raises:
        UsageError: an invalid argument, or a dataset without the column.
    """

    def __init__(
        self,
        model: str,
        params: Mapping[str, Any] | None = None,
        prompt: str = "prompt",
        on_error: Literal["raise", "column"] = "raise",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.params = sampling_params(params)
        if self.params.n != 1:
            raise UsageError(f"a row has one completion: n must be 1, got {self.params.n}")
        if on_error not in ("raise", "column"):
            raise UsageError(f"on_error must be 'raise' or 'column', got {on_error!r}")
        self.prompt, self.on_error = prompt, on_error
        self.engine = AsyncEngine(
            LLM(model, **engine_options(options or {})),
            max_queued=None,  # Ray Data decides how much is under way
        )

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the columns that are added."""
        if self.prompt not in batch:
            raise UsageError(f"the dataset has no column {self.prompt!r}; its columns are {', '.join(batch)}")
        rows = await asyncio.gather(*(self._complete(prompt) for prompt in batch[self.prompt]))
        added: dict[str, Any] = {
            "generated_text": [row.text if isinstance(row, Completion) else "" for row in rows],
            "generated_ids": [list(row.token_ids) if isinstance(row, Completion) else [] for row in rows],
            "finish_reason": [row.finish_reason if isinstance(row, Completion) else "error" for row in rows],
        }
        if self.on_error == "column":
            added["error"] = [_error(row) for row in rows]
        return {**batch, **added}

    async def _complete(self, prompt: Any) -> Completion | str:
        """The completion of a row, or why it was refused."""
        try:
            return (await self.engine.generate(prompt, self.params))[0]
        except (UsageError, RequestTooLarge) as error:
            if self.on_error == "raise":
                raise
            return str(error)


def _error(row: Completion | str) -> str | None:
    if isinstance(row, str):
        return row
    return None if row.error is None else str(row.error)
