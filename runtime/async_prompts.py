"""Prompts and parameters of an `AsyncEngine`'s requests, prepared in the caller's event loop, or beside it where that takes long."""

from __future__ import annotations

import asyncio

from gristmill.runtime.completion import engine_params, text_stream
from gristmill.runtime.errors import UsageError
from gristmill.runtime.integers import as_prompt
from gristmill.runtime.llm import LLM, Prompt
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.structured_output import Grammar
from gristmill.runtime.tokenizer import TextStream, Tokenizer

LONG_TEXT = 4096
"""Prompts of at least this many characters are encoded outside the event loop's thread."""


class AsyncPrompts:
    """From text to token ids and back. llm: whose tokenizer and grammars are used; None = token ids alone, and a UsageError for text."""

    def __init__(self, llm: LLM | None) -> None:
        self._llm = llm

    async def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        given = as_prompt(prompt)
        if not isinstance(given, str):
            return given
        tokenizer = self._tokenizer()
        if len(given) < LONG_TEXT:
            return tokenizer.encode(given)
        return await asyncio.to_thread(tokenizer.encode, given)

    async def grammars(self, params: SamplingParams) -> list[Grammar | None]:
        """A grammar for each completion; None where anything may come out."""
        if params.structured_output is None:
            return [None] * params.n
        return await asyncio.to_thread(self._model().compile_grammars, params)

    def params(self, params: SamplingParams) -> list[SamplingParams]:
        """The parameters of each completion, as the engine takes them."""
        return [engine_params(params, choice, self._tokenizer) for choice in range(params.n)]

    def streams(self, params: SamplingParams) -> list[TextStream | None]:
        """A decoder for each completion; None without a tokenizer."""
        if self._llm is None and not params.stop:
            return [None] * params.n
        return [text_stream(self._tokenizer, params) for _ in range(params.n)]

    def _model(self) -> LLM:
        if self._llm is None:
            raise UsageError(
                "an AsyncEngine of an Engine has no tokenizer: make it with an LLM to serve text"
            )
        return self._llm

    def _tokenizer(self) -> Tokenizer:
        return self._model().tokenizer
