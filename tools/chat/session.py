"""A conversation with a model: what was said, how answers are sampled, and the next answer as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from gristmill.runtime.chat.answer import GrowingMessage, last_delta
from gristmill.runtime.chat.chat import Chat
from gristmill.runtime.chat.conversation import ChatOptions, Delta, Message, Role
from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import open_checkpoint
from gristmill.runtime.sampling_params import SamplingParams, recommended_sampling

TEMPERATURE = 0.7
"""For models that recommend nothing: without chance, small ones repeat themselves."""


@dataclass
class Answer(GrowingMessage):
    """An answer so far.

    Attributes:
        finish_reason: as of `Completion`, or ``interrupted``; None = it has not ended.
        seconds: from the question to the latest token.
    """

    finish_reason: str | None = None
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0


class Session:
    """A conversation.

    Args:
        options: how it is continued: whether the model thinks.
        given: sampling parameters that the user stated, which the model's recommendations do not replace.
        system: the system message; "" = none.

    Attributes:
        stated: the sampling parameters that are not defaults: the model's recommendations and what the user set.
        messages: what was said, without the system message.
    """

    def __init__(
        self,
        llm: LLM,
        chat: Chat,
        generation: Mapping[str, Any],
        given: Mapping[str, Any],
        system: str = "",
        options: ChatOptions | None = None,
    ) -> None:
        self.llm, self._chat, self.system = llm, chat, system
        self.options = options or ChatOptions()
        self.messages: list[Message] = []
        self.stated: dict[str, Any] = {}
        self.replace_params({**recommended(generation), **given})

    @classmethod
    def of(
        cls,
        llm: LLM,
        given: Mapping[str, Any],
        system: str = "",
        options: ChatOptions | None = None,
        *,
        template: str | None = None,
        output_format: str | None = None,
    ) -> Session:
        """A conversation as the model's files have it. template, output_format: as of `Chat`, whose errors are raised."""
        checkpoint = open_checkpoint(llm.path)
        chat = Chat(checkpoint, llm.tokenizer, template=template, output_format=output_format)
        return cls(llm, chat, checkpoint.config()[1], given, system, options)

    def replace_params(self, stated: Mapping[str, Any]) -> None:
        """Take these parameters and defaults for the rest. UsageError: one that there is not, or a value outside its range."""
        params = SamplingParams.of(stated)
        if params.n != 1:
            raise UsageError(f"a conversation has one answer at a time: n must be 1, got {params.n}")
        self.stated = dict(stated)

    def set(self, name: str, value: Any) -> None:
        """Set one parameter; None = its default."""
        stated = {**self.stated, name: value}
        if value is None:
            known = [one.name for one in fields(SamplingParams)]
            if name not in known:
                SamplingParams.of({name: value})  # which says what there is
            del stated[name]
        self.replace_params(stated)

    def ask(
        self, question: str, answer: Answer, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Delta]:
        """Ask, and yield what is added to `answer`, an empty one, after it was added.

        Question and answer become part of the conversation when the answer has ended, also where `stopped` ended it; a failed one, or one
        that was interrupted before it began, leaves it as it was.

        Raises:
            UsageError: a template that refuses the conversation; one that is too long for the model.
        """
        messages = [*self.messages, Message("user", question)]
        yield from self._answer(messages, answer, stopped)
        began = bool(answer.content or answer.reasoning or answer.calls)
        if answer.finish_reason in ("stop", "length") or (began and answer.finish_reason == "interrupted"):
            self.messages = [*messages, answer.message()]

    def undo(self) -> str | None:
        """Take back the last question and its answer; the question. None: there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                question = self.messages[index].content
                self.messages = self.messages[:index]
                return question
        return None

    def _answer(
        self, messages: list[Message], answer: Answer, stopped: Callable[[], bool]
    ) -> Iterator[Delta]:
        system = [Message("system", self.system)] if self.system else []
        begin = time.perf_counter()
        ids = self._chat.encode([*system, *messages], self.options)
        answer.prompt_tokens = len(ids)
        params, make = self._chat.reply(self._params(len(ids)), self.options, ids)
        parser = make()
        with closing(cast("Generator[Chunk]", self.llm.stream([ids], params))) as chunks:
            for chunk in chunks:
                answer.seconds = time.perf_counter() - begin
                answer.first_token_seconds = answer.first_token_seconds or answer.seconds
                answer.output_tokens += len(chunk.token_ids)
                delta = parser.push(chunk.text, chunk.token_ids)
                ended = chunk.finish_reason or ("interrupted" if stopped() else None)
                if ended is not None:
                    delta = last_delta(parser, delta)
                answer.add(delta)
                answer.finish_reason = ended
                answer.error = "" if chunk.error is None else str(chunk.error)
                yield delta
                if ended is not None:
                    return

    def _params(self, prompt_tokens: int) -> SamplingParams:
        """Those stated; an answer may be as long as there is room, where max_tokens is not."""
        limit = self.llm.engine.scheduler.config.capacity
        room = limit - prompt_tokens
        if room < 1:
            raise UsageError(
                f"the conversation has {prompt_tokens} tokens, and the model takes {limit} with the answer: /undo or /clear makes room"
            )
        wanted = self.stated.get("max_tokens")
        return SamplingParams.of({**self.stated, "max_tokens": room if wanted is None else min(wanted, room)})

    def save(self, path: Path) -> None:
        """Write the conversation as JSON: system, params, messages."""
        value = {
            "system": self.system,
            "params": self.stated,
            "messages": [_stored(message) for message in self.messages],
        }
        try:
            text = json.dumps(value, ensure_ascii=False, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
        except TypeError as error:
            raise UsageError(f"cannot write the parameters: {error}") from error
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error

    def load(self, path: Path) -> None:
        """Take a conversation that `save` wrote, or a list of OpenAI's messages; nothing changes where it is wrong."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {path}: {error}") from error
        entries, params, system = value, None, ""
        if isinstance(value, dict):
            entries, params, system = value.get("messages"), value.get("params"), value.get("system") or ""
        if not isinstance(entries, list) or not isinstance(system, str):
            raise UsageError(f"{path}: expected a list of messages, or an object with one")
        messages = [_restored(path, number, entry) for number, entry in enumerate(entries)]
        if messages and messages[0].role == "system":
            system, messages = messages[0].content, messages[1:]
        if params is not None:
            if not isinstance(params, dict):
                raise UsageError(f"{path}: params must be an object")
            self.replace_params(params)
        self.messages, self.system = messages, system


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that a generation_config.json recommends; without one, a temperature."""
    return recommended_sampling(generation) or {"temperature": TEMPERATURE}


def _stored(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    return entry


def _restored(path: Path, number: int, entry: Any) -> Message:
    roles: tuple[Role, ...] = ("system", "user", "assistant")
    if isinstance(entry, dict) and entry.get("role") in roles and isinstance(entry.get("content"), str):
        thought = entry.get("reasoning_content") or ""
        if isinstance(thought, str):
            return Message(entry["role"], entry["content"], thought)
    raise UsageError(
        f"{path}: messages[{number}] must have a role (system, user, assistant) and content as text, got {entry!r:.100}"
    )
