"""Completions as text: the engine's outputs of one request become chunks; stop strings, and several completions of one prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from io import StringIO

from gristmill.quant.checkpoints.checkpoint import NoTokenizerError
from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.sampling_params import MAX_SEED, SamplingParams
from gristmill.runtime.scheduler import FinishReason, RequestOutput, TokenLogprobs
from gristmill.runtime.tokenizer import TextStream, Tokenizer


class StopStrings:
    """Passes text on until a stop string is complete; text that may be the beginning of one is held back.

    The output does not depend on how the text is split into pieces. Of several stop strings the one that is complete first ends
    the text; of those complete at the same character, the longest.

    Args:
        strings: the stop strings, none of them empty.
        include: whether the stop string that ends the text is part of it.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""  # the longest suffix of the text so far that is a prefix of a stop string
        self.matched: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """Take more text; returns what is certain. `matched` is set when a stop string is complete, and nothing comes after it.

        With `armed` False no stop string may be complete within this text; one may begin in it.
        """
        if self.matched is not None:
            return ""
        buffer = self._held + text
        if armed and (match := self._first(buffer, len(self._held))) is not None:
            start, self.matched = match
            self._held = ""
            return buffer[: start + len(self.matched)] if self._include else buffer[:start]
        length = self._beginning(buffer)
        self._held = buffer[len(buffer) - length :]
        return buffer[: len(buffer) - length]

    def finish(self) -> str:
        """The text that was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _first(self, buffer: str, known: int) -> tuple[int, str] | None:
        """(start, string) of the stop string that is complete first, after the first `known` characters."""
        best: tuple[int, int, str] | None = None
        for string in self._strings:
            start = buffer.find(string, max(0, known - len(string) + 1))
            if start >= 0 and (best is None or (start + len(string), start) < best[:2]):
                best = (start + len(string), start, string)
        return None if best is None else best[1:]

    def _beginning(self, buffer: str) -> int:
        """Length of the longest suffix of the buffer that is a proper prefix of a stop string."""
        longest = max((len(string) for string in self._strings), default=0)
        for length in range(min(longest - 1, len(buffer)), 0, -1):
            end = buffer[len(buffer) - length :]
            if any(len(string) > length and string.startswith(end) for string in self._strings):
                return length
        return 0


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        prompt_ids, token_ids: token ids of the prompt and of the completion, including a final end token.
        text: the completion as text that goes on from the prompt's, up to a stop string; empty for a model without a tokenizer.
        finish_reason: ``stop`` (an end token or a stop string), ``length``, ``abort``, or ``error`` (no token could be sampled).
        choice: which of the prompt's `SamplingParams.n` completions this is, from 0.
        stop_reason: the stop string, or the id among stop_token_ids, that ended it; None = something else did.
        logprobs: one for each token of the completion; None = not asked for.
        prompt_logprobs: one for each token of the prompt, None for the first; None = not asked for, or choice is not 0.
        error: the cause of finish_reason ``error``; else None.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    choice: int = 0
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True)  # frozen, each takes five times as long to make: one for every token
class Chunk:
    """The part of a completion that one step added. It is a value: nobody changes it.

    Attributes:
        index: the index of the prompt, from 0.
        token_ids: new token ids.
        text: new text, of whole characters, without what may be the beginning of a stop string; a step may have none.
        finish_reason: as of `Completion`; None until the last chunk of the completion.
        choice, stop_reason, error: as of `Completion`.
        logprobs: one for each new token; None = not asked for.
        prompt_logprobs: as of `Completion`, in the first chunk; None in the others.
        cached_tokens: tokens of the prompt that were found in the prefix cache. Chunks that differ in it alone are equal.
        begun: when the first of several outputs in it came, by time.monotonic; None = it is one output's. Chunks that differ in it alone are equal.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    choice: int = 0
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = field(default=0, compare=False)
    begun: float | None = field(default=None, compare=False)


def engine_params(params: SamplingParams, choice: int, tokenizer: Callable[[], Tokenizer]) -> SamplingParams:
    """The parameters of one completion as the engine takes them: without n, stop strings and grammar, and with bad words as token ids.

    `tokenizer` is called if text must be encoded. Choices after the first have their own seeds and no logprobs of the prompt.
    """
    text_words = any(isinstance(word, str) for word in params.bad_words)
    if params.n == 1 and not params.stop and not text_words and params.structured_output is None:
        return params
    words = [
        ids
        for word in params.bad_words
        for ids in (tokenizer().words(word) if isinstance(word, str) else [word])
    ]
    return replace(
        params,
        n=1,
        stop=(),
        structured_output=None,
        bad_words=words,
        seed=None if params.seed is None else (params.seed + choice) % (MAX_SEED + 1),
        prompt_logprobs=params.prompt_logprobs if choice == 0 else None,
    )


class GrowingCompletion:
    """The chunks of one completion, joined as they come: what is kept per token is a number, no object for the garbage collector."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._text = StringIO()
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._last: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        """The next chunk."""
        self._ids += chunk.token_ids
        self._text.write(chunk.text)
        self._logprobs += chunk.logprobs or ()
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = chunk.prompt_logprobs
        self._last = chunk

    def chunk(self) -> Chunk:
        """All chunks so far, at least one, as one."""
        last = self._require_last()
        return replace(
            last,
            token_ids=tuple(self._ids),
            text=self._text.getvalue(),
            logprobs=None if last.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )

    def completion(self, prompt_ids: Sequence[int]) -> Completion:
        """All chunks so far, at least one, as a completion of the prompt."""
        last = self._require_last()
        return Completion(
            tuple(prompt_ids),
            tuple(self._ids),
            self._text.getvalue(),
            last.finish_reason or FinishReason.ABORT.value,
            last.choice,
            last.stop_reason,
            None if last.logprobs is None else tuple(self._logprobs),
            self._prompt_logprobs,
            last.error,
        )

    def _require_last(self) -> Chunk:
        if self._last is None:
            raise RuntimeError("a completion of no chunks")
        return self._last


class GrowingChoices(dict[int, GrowingCompletion]):
    """The completions of one prompt by their choice, joined as their chunks come."""

    async def of(self, stream: AsyncGenerator[Chunk, None], prompt_ids: Sequence[int]) -> list[Completion]:
        """The completions of a stream, in order of their choice."""
        async with aclosing(stream):
            async for chunk in stream:
                if chunk.choice not in self:
                    self[chunk.choice] = GrowingCompletion()
                self[chunk.choice].add(chunk)
        return [self[choice].completion(prompt_ids) for choice in sorted(self)]


def text_stream(
    tokenizer: Callable[[], Tokenizer], params: SamplingParams, prompt: Sequence[int]
) -> TextStream | None:
    """A decoder for one completion of a prompt; None for a model without a tokenizer, unless stop strings need one (NoTokenizerError)."""
    try:
        return tokenizer().stream(params.skip_special_tokens, prompt)
    except NoTokenizerError:
        if params.stop:
            raise
        return None


class TextOutput:
    """The text of one completion while it grows. `index` and `choice` are those of its chunks; without a tokenizer `stream` is None.

    Args:
        whole: nobody reads it before it has ended. Unless stop strings must be looked for, its outputs are then kept for one chunk at its end,
            which spares the host a chunk for each of them.
    """

    def __init__(
        self,
        index: int,
        choice: int,
        params: SamplingParams,
        stream: TextStream | None,
        *,
        whole: bool = False,
    ) -> None:
        self.index, self.choice = index, choice
        self.whole = whole and not params.stop
        self._kept_ids: list[int] = []
        self._kept_logprobs: list[TokenLogprobs] = []
        self._kept_prompt: tuple[TokenLogprobs | None, ...] | None = None
        self._begun: float | None = None
        self._params = params
        self._stream = stream
        self._stop = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._count = 0  # output tokens so far

    def keep(self, output: RequestOutput) -> bool:
        """Keep an output of the engine for a later chunk; False if its chunk is due now, which `push` returns."""
        if not self.whole or output.finish_reason is not None:
            return False
        if self._begun is None:
            self._begun = time.monotonic()
        self._kept_ids += output.new_ids
        if output.logprobs:
            self._kept_logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self._kept_prompt = output.prompt_logprobs
        return True

    def push(self, output: RequestOutput) -> Chunk:
        """The chunk of an output of the engine, and of those that were kept. If a stop string ends it, the caller must abort the request in the
        engine."""
        ids = (*self._kept_ids, *output.new_ids)
        prompt_logprobs = self._kept_prompt if output.prompt_logprobs is None else output.prompt_logprobs
        reason = output.finish_reason
        stop_reason: int | str | None = None
        if reason is FinishReason.STOP and ids[-1] in self._params.stop_token_ids:
            stop_reason = ids[-1]
        if self._stop is None or self._stream is None:
            text = self._decode(ids, reason)
        else:
            text, count = self._decode_until_stop(self._stop, self._stream, ids, reason)
            ids = ids[:count]
            if self._stop.matched is not None:
                reason, stop_reason = FinishReason.STOP, self._stop.matched
        return Chunk(
            self.index,
            ids,
            text,
            None if reason is None else reason.value,
            self.choice,
            stop_reason,
            None if self._params.logprobs is None else (*self._kept_logprobs, *output.logprobs)[: len(ids)],
            prompt_logprobs,
            output.error if reason is FinishReason.ERROR else None,
            output.cached_tokens,
            self._begun,
        )

    def _decode(self, ids: tuple[int, ...], reason: FinishReason | None) -> str:
        if self._stream is None:
            return ""
        if self.whole:
            return self._stream.whole(self._shown(ids, reason))
        text = self._stream.push(self._shown(ids, reason))
        return text if reason is None else text + self._stream.finish()

    def _shown(self, ids: tuple[int, ...], reason: FinishReason | None) -> tuple[int, ...]:
        """The ids that are text: where special tokens are, the one that ended the request is none."""
        ended = reason is FinishReason.STOP and not self._params.skip_special_tokens
        return ids[:-1] if ended and not self._params.include_stop_str_in_output else ids

    def _decode_until_stop(
        self, stop: StopStrings, stream: TextStream, ids: tuple[int, ...], reason: FinishReason | None
    ) -> tuple[str, int]:
        """(the text that is final, the number of ids up to the end of a stop string, or of all ids)."""
        text = ""
        shown = len(self._shown(ids, reason))
        for count, token in enumerate(ids, 1):
            self._count += 1
            if count > shown:
                break
            text += stop.push(stream.push([token]), armed=self._count > self._params.min_tokens)
            if stop.matched is not None:
                return text, count
        if reason is not None:
            text += stop.push(stream.finish(), armed=self._count > self._params.min_tokens)
            text += stop.finish()
        return text, len(ids)
