"""An engine that says what a test tells it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from gristmill.runtime.completion import Chunk
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import TokenLogprobs

Script = Callable[[Sequence[int], SamplingParams], Sequence[Chunk]]


def echo(ids: Sequence[int], params: SamplingParams) -> list[Chunk]:
    """max_tokens words, of the token ids of the prompt, or those that are allowed, in turn."""
    words = params.allowed_token_ids or ids
    found = []
    for choice in range(params.n):
        for index in range(params.max_tokens):
            token = words[index % len(words)]
            logprobs = None
            if params.logprobs is not None:
                logprobs = (TokenLogprobs(token, -1.0, 1, ((token, -1.0),) * params.logprobs),)
            last = index == params.max_tokens - 1
            found.append(
                Chunk(0, (token,), f" {token}", "length" if last else None, choice, logprobs=logprobs)
            )
    return found


class ScriptedEngine:
    """Streams the chunks of a script, and lets others run between two of them.

    Attributes:
        active: requests that have not ended; left: those whose caller has left before the end.
        go_on: while it is not set, requests get one chunk each. It is, unless a test clears it.
        whole: whether each request so far wanted one chunk of each completion.
    """

    def __init__(self, script: Script = echo, seconds: float = 0.0) -> None:
        self._script, self._seconds = script, seconds
        self.active = self.left = 0
        self.whole: list[bool] = []
        self.go_on = threading.Event()
        self.go_on.set()

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks."""
        self.whole.append(whole)
        self.active += 1
        ended = False
        try:
            for chunk in self._script(prompt, params or SamplingParams()):
                await asyncio.sleep(self._seconds)
                yield chunk
                while not self.go_on.is_set():
                    await asyncio.sleep(0.005)
            ended = True
        finally:
            self.active -= 1
            self.left += not ended

    async def status(self) -> list[Any]:
        """None."""
        return []

    async def explain(self) -> list[Any]:
        """Nothing ran."""
        return []

    async def drain(self, timeout: float | None = None) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
