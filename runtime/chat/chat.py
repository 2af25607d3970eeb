"""Conversations of a model: from messages to the token ids of a prompt, and from its output to messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.runtime.chat.answer import GrowingAnswer, as_messages
from gristmill.runtime.chat.conversation import ChatOptions, Message, Tool
from gristmill.runtime.chat.formats import OutputParser, find_format
from gristmill.runtime.chat.template import ChatTemplate
from gristmill.runtime.errors import UsageError
from gristmill.runtime.loader.config import open_checkpoint
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import Tokenizer

OWN_VARIABLES = frozenset(("self", "messages", "tools", "add_generation_prompt", "range"))
"""Variables of templates that a conversation sets itself."""
TAIL = 256
"""Characters of a prompt's end that a parser looks at: whether a thought is open already."""


class Chat:
    """What a model's files say about conversations: templates, special tokens, the format of its messages.

    Args:
        template: a Jinja template, or the path of one, instead of the model's.
        output_format: the name of a format (`gristmill.runtime.chat.formats`); None = found by the template.

    Raises:
        UsageError: a template or a format that there is not, or that is wrong. A model without a template has conversations only with `template`.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        output_format: str | None = None,
    ) -> None:
        checkpoint = open_checkpoint(model)
        files = checkpoint.chat_files()
        self._tokenizer, self._origin, self._tokens = tokenizer, str(checkpoint.path), files.tokens
        given = {} if template is None else {"default": _text_of(template)}
        texts = given or files.templates
        self._templates = {name: ChatTemplate(text, self._origin) for name, text in texts.items()}
        self._format = find_format("\n".join(texts.values()), output_format)

    @property
    def output_format(self) -> str:
        """The name of the format of messages."""
        return self._format.name

    def require_template(self) -> None:
        """UsageError: there is no template, so that no conversation can be rendered."""
        self._template(False)

    def render(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> str:  # noqa: B008
        """The prompt as text.

        Raises:
            UsageError: there is no template, or it refuses the conversation; arguments of a tool call that are no JSON object.
        """
        if taken := OWN_VARIABLES & options.template_arguments.keys():
            raise UsageError(f"the conversation itself sets {', '.join(sorted(taken))} of its template")
        template = self._template(bool(options.tools) and options.tool_choice != "none")
        if options.continue_final and (not messages or messages[-1].role != "assistant"):
            raise UsageError("continue_final_message needs a last message of the assistant")
        variables: dict[str, Any] = {**self._tokens, "documents": None, **options.template_arguments}
        if options.reasoning is not None:
            variables["enable_thinking"] = variables["thinking"] = options.reasoning
        if options.reasoning_effort is not None:
            variables["reasoning_effort"] = options.reasoning_effort
        shown = () if options.tool_choice == "none" else options.tools
        developer = "developer" in template.text
        text = template.render(
            [_entry(one, index, developer) for index, one in enumerate(messages)],
            **{
                **variables,
                "tools": [_tool(one) for one in shown] or None,
                "add_generation_prompt": options.add_generation_prompt and not options.continue_final,
            },
        )
        return _up_to_end(text, messages[-1].content) if options.continue_final else text

    def encode(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> list[int]:  # noqa: B008
        """The prompt as token ids. Errors are those of `render`."""
        ids = self._tokenizer.encode(self.render(messages, options), add_special_tokens=False)
        if not ids:
            raise UsageError("the chat template makes an empty prompt of this conversation")
        return ids

    def reply(
        self, params: SamplingParams, options: ChatOptions, prompt: Sequence[int] | str
    ) -> tuple[SamplingParams, Callable[[], OutputParser]]:
        """(sampling of a prompt's completions as the format needs it, what makes the parser of one).

        The format adds what ends a message, a grammar where calls are bound, special tokens in the text.

        Raises:
            UsageError: calls and a structured output that cannot both be kept.
        """
        found, tail = self._format, self._tail(prompt)
        wanted = params.structured_output
        options = replace(options, answer_bound=wanted is not None and not wanted.own_grammar)
        stops = [token for name in found.stop if (token := self._tokenizer.token_id(name)) is not None]
        structure = found.structure(options, wanted, tail)
        changes: dict[str, Any] = {}
        if stops:
            changes["stop_token_ids"] = [*params.stop_token_ids, *stops]
        if structure is not wanted:
            changes["structured_output"] = structure
        if found.special_tokens:
            changes["skip_special_tokens"] = False
        return replace(params, **changes) if changes else params, lambda: found.parser(options, tail)

    def _tail(self, prompt: Sequence[int] | str) -> str:
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt[-64:], False)
        return text[-TAIL:]

    def _template(self, tools: bool) -> ChatTemplate:
        found = self._templates.get("tool_use") if tools else None
        found = found or self._templates.get("default")
        if found is None and len(self._templates) == 1:
            [found] = self._templates.values()
        if found is None:
            raise UsageError(
                f"{self._origin} has no chat template: give one (chat_template), or use completions of text"
            )
        return found


def prepare_chat(
    chat: Chat,
    messages: Sequence[Message | Mapping[str, Any]],
    params: SamplingParams | None,
    options: ChatOptions | None,
) -> tuple[list[int], SamplingParams, GrowingAnswer]:
    """(token ids, sampling, what takes the chunks) of one answer. UsageError: as `as_messages` and `Chat`; several completions."""
    params, options = params or SamplingParams(), options or ChatOptions()
    if params.n != 1:
        raise UsageError(f"a conversation has one answer at a time: n must be 1, got {params.n}")
    ids = chat.encode(as_messages(messages), options)
    params, parser = chat.reply(params, options, ids)
    return ids, params, GrowingAnswer(parser(), len(ids))


def _text_of(template: str) -> str:
    """A template, or what is in the file that it names."""
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the chat template {template}: {error}") from error


def _entry(message: Message, index: int, developer: bool) -> Mapping[str, Any]:
    """A message as templates know it."""
    role = "system" if message.role == "developer" and not developer else message.role
    entry: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning:  # under the names that templates use
        entry |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments, index)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    if message.name:
        entry["name"] = message.name
    return entry


def _arguments(text: str, index: int) -> Mapping[str, Any]:
    """Templates iterate over the arguments of a call."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"messages[{index}]: the arguments of a tool call are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(
            f"messages[{index}]: the arguments of a tool call must be a JSON object, got {text[:80]!r}"
        )
    return value


def _tool(tool: Tool) -> Mapping[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _up_to_end(text: str, content: str) -> str:
    """A prompt without what the template puts after the last message's content."""
    wanted = content.strip()
    at = text.rfind(wanted) if wanted else -1
    if at < 0:
        raise UsageError("continue_final_message: the template does not show the last message as it is")
    end = at + len(wanted)
    kept = content[len(content.rstrip()) :]
    return text[:end] + (kept if text[end:].startswith(kept) else "")
