"""An engine that says what a test wants, and a chat whose format needs no model: outputs are known, whatever the formats of models are.

In a script, thoughts stand between « and », and a call of a tool is ⟦name|arguments⟧.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from gristmill.runtime.chat.conversation import CallDelta, ChatOptions, Delta, Message
from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import TokenLogprobs
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.serve.config import ServeConfig
from gristmill.serve.request_log import RequestLog
from gristmill.serve.service import Service
from tests.serve.server import MODEL, serving, until_ready


@dataclass
class Script:
    """What the engine does with a request.

    Attributes:
        text: what it writes: a token per character.
        finish: why it ends; ``hang``: it never does.
        error: raised after the text, or before it if there is none.
        sizes: tokens of a step, one of them at random.
    """

    text: str = ""
    finish: str = "stop"
    stop_reason: int | str | None = None
    info: ErrorInfo | None = None
    error: BaseException | None = None
    sizes: Sequence[int] = (1, 1, 2, 3, 7, 40)


@dataclass
class Player:
    """Plays a script for every request, cut at random places.

    Attributes:
        script: the next one.
        seen: token ids and parameters of the requests so far.
        left: requests whose caller left before their end.
    """

    script: Script = field(default_factory=Script)
    seed: int = 0
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    left: int = 0

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """The script in chunks."""
        script, cuts = self.script, random.Random(self.seed)
        params = SamplingParams() if params is None else params
        self.seen.append((list(prompt), params))
        ended = False
        try:
            if script.error is not None and not script.text:
                raise script.error
            place = 0
            while place < len(script.text):
                size = cuts.choice(script.sizes)
                piece = script.text[place : place + size]
                place += size
                await asyncio.sleep(0)
                yield self._chunk(piece, params)
            if script.error is not None:
                raise script.error
            while script.finish == "hang":
                await asyncio.sleep(0.005)
            ended = True
            yield Chunk(
                0, (2,), "", script.finish, stop_reason=script.stop_reason, logprobs=None, error=script.info
            )
        finally:
            self.left += not ended and script.error is None

    def _chunk(self, piece: str, params: SamplingParams) -> Chunk:
        ids = tuple(ord(character) % 256 for character in piece)
        entries = None
        if params.logprobs is not None:
            top = tuple((10 + rank, -1.0 - rank) for rank in range(params.logprobs))
            entries = tuple(TokenLogprobs(token, -0.5, 1, top) for token in ids)
        return Chunk(0, ids, piece, logprobs=entries)

    async def status(self) -> list[Any]:
        """None."""
        return []

    async def drain(self, timeout: float | None = None) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There is no process."""


class ScriptedParser:
    """Text, thoughts and calls of a script."""

    def __init__(self) -> None:
        self.reasoning_tokens = self.calls = 0
        self.open_call = False
        self._inside = ""  # thoughts, name, arguments

    def push(self, text: str, ids: Sequence[int] = ()) -> Delta:
        """What more of the script says."""
        delta = Delta(calls=[])
        for character in text:
            self._one(character, delta)
        return delta

    def _one(self, character: str, delta: Delta) -> None:
        calls: Any = delta.calls
        if character == "«":
            self._inside = "thoughts"
        elif character == "⟦":
            self._inside, self._name = "name", ""
        elif character in "»⟧":
            self._inside, self.open_call = "", False
        elif self._inside == "thoughts":
            self.reasoning_tokens += 1
            delta.reasoning += character
        elif self._inside == "name" and character == "|":
            self._inside, self.open_call = "arguments", True
            calls.append(CallDelta(self.calls, "", f"call_{self.calls}x", self._name))
            self.calls += 1
        elif self._inside == "name":
            self._name += character
        elif self._inside == "arguments":
            calls.append(CallDelta(self.calls - 1, character))
        else:
            delta.content += character

    def finish(self) -> Delta:
        """Nothing was held back."""
        return Delta()


class ScriptedChat:
    """Conversations as lines, which tests can read.

    Attributes:
        seen: conversations and options so far.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.seen: list[tuple[list[Message], ChatOptions]] = []

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """A line for each message."""
        return "".join(f"{one.role}: {one.content}\n" for one in messages)

    def encode(self, messages: Sequence[Message], options: ChatOptions | None = None) -> list[int]:
        """Its token ids."""
        self.seen.append((list(messages), options or ChatOptions()))
        return self._tokenizer.encode(self.render(messages))

    def reply(
        self, params: SamplingParams, options: ChatOptions, prompt: Sequence[int]
    ) -> tuple[SamplingParams, Callable[[], ScriptedParser]]:
        """Sampling unchanged."""
        return params, ScriptedParser


@dataclass
class Stage:
    """A server over a scripted engine."""

    url: str
    engine: Player
    service: Service

    @property
    def seen(self) -> tuple[list[Message], ChatOptions, SamplingParams]:
        """Conversation, options and parameters of the last request."""
        chat: Any = self.service.chat
        return *chat.seen[-1], self.engine.seen[-1][1]

    def plays(self, text: str, finish: str = "stop", seed: int = 0, **more: Any) -> None:
        """What requests get from now on."""
        self.engine.script = Script(text, finish, **more)
        self.engine.seed = seed


HTTP = httpx.Client(timeout=60)
"""For requests without a package: to make one takes longer than a request."""


@contextmanager
def stage(chat: Callable[[Tokenizer], Any] = ScriptedChat, **options: Any) -> Iterator[Stage]:
    """A server that plays scripts while the block runs. `chat` makes its conversations from the tokenizer."""
    tokenizer = Tokenizer(MODEL)
    config = ServeConfig(**{"port": 0, "drain_seconds": 2.0, "log_file": "/dev/null", **options})
    service = Service(
        config, ("scripted",), tokenizer, chat(tokenizer), 512, 4096, {}, RequestLog(config.log_file)
    )
    engine = Player()
    with serving(service, lambda service: engine) as url:
        if not config.render_only:
            until_ready(service)
        yield Stage(url, engine, service)
