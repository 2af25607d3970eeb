"""Grammars of outputs with thoughts and calls: what is required or strict is right by construction."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gristmill.runtime.chat.conversation import ChatOptions, Tool
from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammar_parts import free_part, quoted, tags_part, text_part, until_part
from gristmill.runtime.structured_output import StructuredOutput


def chosen_tools(options: ChatOptions) -> tuple[Tool, ...]:
    """The tools that a required call may name."""
    if options.tool_choice == "named":
        return tuple(tool for tool in options.tools if tool.name == options.tool_name)
    return options.tools


def strict(options: ChatOptions) -> bool:
    """Whether a tool that the model is free to call is strict."""
    return options.tool_choice == "auto" and any(tool.strict for tool in options.tools)


def bound(options: ChatOptions) -> bool:
    """Whether calls that the model is free to make follow a grammar: a tool is strict, or there is at most one call."""
    single = options.tool_choice == "auto" and bool(options.tools) and not options.parallel_tool_calls
    return single or strict(options)


def parameters(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments; any object if it has none."""
    return tool.parameters or {"type": "object"}


def call_of_each(tools: Sequence[Tool], begin: Callable[[Tool], str], end: str) -> str:
    """The rules of ``call``: of each tool, what begins its call, its arguments as JSON, and what ends it, as parts of rules."""
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    lines = [f"call: {names}"]
    for i, tool in enumerate(tools):
        lines.append(f"call_{i}: {begin(tool)} %json {json.dumps(parameters(tool))} {end}")
    return "\n".join(lines)


def call_in_json(tools: Sequence[Tool], arguments: str, begin: str = "", end: str = "") -> str:
    """The rules of ``call`` as a JSON object with ``name`` and the arguments under this name, between two texts.

    Each tool's schema stays whole: its references are to its own root.
    """
    return call_of_each(
        tools,
        lambda tool: text_part(
            f'{begin}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
        ),
        text_part(f"}}{end}"),
    )


def call_in_pairs(
    tools: Sequence[Tool], begin: Callable[[Tool], str], key: Callable[[str], str], value_end: str, end: str
) -> str:
    """The rules of ``call`` where arguments stand as keys and values: texts as they are, other values as JSON. Of texts, only ``enum`` is kept.

    Args:
        begin, key: of a tool and of an argument, what is before, as parts of rules.
        value_end, end: texts after each value and after the call.

    Raises:
        UsageError: a strict tool whose schema says more than these rules can.
    """
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    lines = [f"call: {names}"]
    for i, tool in enumerate(tools):
        if tool.strict:
            _require_pairs(tool, value_end.strip())
        pairs = []
        for k, (name, schema) in enumerate(tool.parameters.get("properties", {}).items()):
            pairs.append(f"pair_{i}_{k}" + ("" if name in tool.parameters.get("required", ()) else "?"))
            lines.append(f"pair_{i}_{k}: {key(name)} {_value(tool, schema, value_end)}")
        lines.append(f"call_{i}: {begin(tool)} {' '.join(pairs)} {text_part(end)}")
    return "\n".join(lines)


SAID_OF_PAIRS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
    + ("title", "description", "$schema", "$id", "$comment", "examples", "default")
)
"""What a schema may say that `call_in_pairs` keeps, and what binds nothing."""
SAID_OF_TEXTS = frozenset(("type", "enum", "title", "description", "$comment", "examples", "default"))


def _require_pairs(tool: Tool, mark: str) -> None:
    """UsageError unless keys and values, the texts among them raw up to a mark, can follow a tool's schema."""
    schemas = tool.parameters.get("properties", {})
    faults = [f"its schema has {name}" for name in tool.parameters if name not in SAID_OF_PAIRS]
    faults += [
        f"{name} is required, and no property"
        for name in tool.parameters.get("required", ())
        if name not in schemas
    ]
    if tool.parameters.get("additionalProperties"):
        faults.append("its schema allows additionalProperties")
    for name, schema in schemas.items():
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            faults += [f"the text {name} has {more}" for more in schema if more not in SAID_OF_TEXTS]
            faults += [f"the text {name} may be {one!r}" for one in schema.get("enum", ()) if mark in one]
    if faults:
        raise UsageError(
            f"the tool {tool.name!r} is strict, which this model's format of calls cannot keep: {'; '.join(faults)}. Texts are bound by enum only"
        )


def _value(tool: Tool, schema: Any, end: str) -> str:
    """A value and its end, as a part of a rule."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        if not schema.get("enum"):  # up to the mark alone: what stands around it is the parser's to strip
            return f"{until_part(end.strip())} {text_part(end[len(end.rstrip()) :]) if end != end.rstrip() else ''}"
        return f"({' | '.join(text_part(one + end) for one in schema['enum'])})"
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    whole = {**schema, **shared} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(whole)} {text_part(end)}"


def required_calls(
    options: ChatOptions,
    wanted: StructuredOutput | None,
    thought: str,
    rules: str,
    joint: str | None = None,
    around: tuple[str, str] = ("", ""),
    *,
    opening: str = "",
    never: tuple[str, ...] = (),
    text: str = "",
    head: str = "",
) -> StructuredOutput | None:
    """The structure of an output after a thought: required calls; else calls or what the request wants; else, if they are `bound`, text or calls.

    Args:
        thought: the rules of ``thought``, which may be before; "" = none.
        rules: the rules of ``call``, one call, in llguidance's dialect of Lark.
        joint: the text between two calls; None = there is at most one.
        around: what is before the first call and after the last, as parts of rules.
        opening: the text that stands before all of these, by which the parser knows calls in a text.
        never: further texts that the parser takes for the beginning of a call.
        text: of formats without an opening, what an answer without calls looks like, as parts of rules.
        head: what stands before an answer in the request's format, as a part of a rule.

    Raises:
        UsageError: a format of the answer beside which these calls cannot be kept.
    """
    required = options.tool_choice in ("required", "named")
    if wanted is not None and required:
        raise UsageError("a required tool call and a response format exclude each other")
    either = wanted is not None and _beside_calls(options, wanted)
    if not required and not either and (wanted is not None or not bound(options)):
        return after_thought(wanted, thought, head)
    several = joint is not None and options.parallel_tool_calls and options.tool_choice != "named"
    next_call = f"{text_part(joint)} call" if joint else "call"
    calls = f"{around[0]} call{f' ({next_call})*' if several else ''} {around[1]}"
    begun = f"{text_part(opening)} {calls}" if opening else calls
    if required:
        message = begun
    elif wanted is not None:
        message = f"{begun} | {head} answer"
        rules += f"\n{_answer_rule(wanted, (opening, *never) if opening else ())}"
    elif opening:
        message = f"{free_part(opening, *never)} | {until_part(opening, *never)} {calls}"
    else:
        message = f"{text} | {calls}"
    before = "thought " if thought else ""
    return StructuredOutput(grammar=f"start: {before}message\nmessage: {message}\n{rules}\n{thought}")


def _beside_calls(options: ChatOptions, wanted: StructuredOutput) -> bool:
    """Whether a message may be calls instead of an answer in this format. A request's own grammar or tags describe its calls, too.

    Raises:
        UsageError: they do, and the request binds its calls otherwise.
    """
    if options.tool_choice != "auto" or not options.tools:
        return False
    if not wanted.own_grammar:
        return True
    if bound(options):
        raise UsageError(
            "a grammar or structural_tag describes a whole message, so that strict tools and parallel_tool_calls=false cannot be kept beside it: "
            "use a JSON schema, a regex or a choice, or leave these out"
        )
    return False


def after_thought(wanted: StructuredOutput | None, thought: str, head: str = "") -> StructuredOutput | None:
    """A structured output that a thought and `head` may precede, and that binds only what follows them."""
    if wanted is None or not (thought or head):
        return wanted
    before = "thought " if thought else ""
    return StructuredOutput(grammar=f"start: {before}{head} answer\n{_answer_rule(wanted)}\n{thought}")


def _answer_rule(wanted: StructuredOutput, never: tuple[str, ...] = ()) -> str:
    """The rule of ``answer``: what a request wants, where it does not begin with a text of `never`.

    Raises:
        UsageError: a choice that begins with one.
    """
    if wanted.json_schema is not None:
        schema = wanted.json_schema
        return f"answer: %json {schema if isinstance(schema, str) else json.dumps(dict(schema))}"
    if wanted.choice is not None:
        for one in wanted.choice:
            if one.lstrip().startswith(never):
                raise UsageError(
                    f"the choice {one!r} cannot stand beside tools: it begins like a call of one"
                )
        return "answer: " + " | ".join(map(quoted, wanted.choice))
    if wanted.regex is not None:
        regex = f"/{_SLASH.sub(_escaped, wanted.regex)}/"
        if never:
            any_of = "|".join(_SLASH.sub(_escaped, re.escape(one)) for one in never)
            regex += f" & ~/[{BLANK}]*({any_of})(?s:.*)/"
        return f"answer: ANSWER\nANSWER: {regex}"
    if wanted.grammar is not None:
        return f"answer: %lark {{\n{wanted.grammar}\n}}"
    return f"answer: {tags_part(wanted.structural_tag or {})}"


BLANK = r"\s\x1c-\x1f"
"""What `str.strip` strips, as a part of a regex's class."""
_SLASH = re.compile(r"\\.|/", re.DOTALL)


def _escaped(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else "\\/"


def thought_rule(think: tuple[str, str] | None, options: ChatOptions, tail: str) -> str:
    """The rules of ``thought``: the rest of one that the prompt has begun, or one that may be there; "" if there is none."""
    if think is None or options.reasoning is False:
        return ""
    inside = f"inside: {until_part(think[1])}\nblanks: /[\\n ]{{0,4}}/"
    if tail.rstrip().endswith(think[0]):
        return f"thought: inside blanks\n{inside}"
    return f"thought: ({text_part(think[0])} inside blanks)?\n{inside}"


def refuse_required(
    options: ChatOptions, wanted: StructuredOutput | None, name: str
) -> StructuredOutput | None:
    """For formats whose calls no grammar describes. UsageError: a call is required, or a tool is strict."""
    if strict(options):
        raise UsageError(
            f"strict tools are not supported by the chat format {name}: leave strict out, or name another format (chat_format)"
        )
    if options.tool_choice in ("required", "named"):
        raise UsageError(
            f"tool_choice {options.tool_choice!r} is not supported by the chat format {name}: use auto"
        )
    return wanted
