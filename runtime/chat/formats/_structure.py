"""Grammars of outputs with thoughts and calls: what is required is right by construction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.runtime.chat.conversation import ChatOptions, Tool
from gristmill.runtime.errors import UsageError
from gristmill.runtime.structured_output import StructuredOutput


def chosen_tools(options: ChatOptions) -> tuple[Tool, ...]:
    """The tools that a required call may name."""
    if options.tool_choice == "named":
        return tuple(tool for tool in options.tools if tool.name == options.tool_name)
    return options.tools


def call_schema(tools: Sequence[Tool], arguments: str) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools, with its arguments under this name."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, arguments: parameters(tool)},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
    }


def parameters(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments; any object if it has none."""
    return tool.parameters or {"type": "object"}


def required_calls(
    options: ChatOptions, wanted: StructuredOutput | None, thought: str, rules: str, joint: str = ""
) -> StructuredOutput | None:
    """The structure of an output: calls if they are required, else what the request wants, after a thought.

    Args:
        thought: the rules of ``thought``, which may be before; "" = none.
        rules: the rules of ``call``, one call, in llguidance's dialect of Lark.
        joint: the text between two calls; "" = there is at most one.
    """
    required = options.tool_choice in ("required", "named")
    if not required:
        return wanted if wanted is None or not thought else after_thought(wanted, thought)
    if wanted is not None:
        raise UsageError("a required tool call and a response format exclude each other")
    several = joint and options.parallel_tool_calls and options.tool_choice == "required"
    more = f" ({json.dumps(joint)} call)*" if several else ""
    before = "thought " if thought else ""
    return StructuredOutput(grammar=f"start: {before}call{more}\n{rules}\n{thought}")


def after_thought(wanted: StructuredOutput, thought: str) -> StructuredOutput:
    """A structured output that a thought precedes. Grammars and structural tags are the request's own: they stay as they are."""
    if wanted.json_schema is not None:
        schema = wanted.json_schema
        answer = f"%json {schema if isinstance(schema, str) else json.dumps(dict(schema))}"
    elif wanted.choice is not None:
        answer = " | ".join(json.dumps(one) for one in wanted.choice)
    elif wanted.regex is not None:
        answer = "/" + wanted.regex.replace("/", "\\/") + "/"
    else:
        return wanted
    return StructuredOutput(grammar=f"start: thought answer\nanswer: {answer}\n{thought}")


def thought_rule(think: tuple[str, str] | None, options: ChatOptions, tail: str) -> str:
    """The rules of ``thought``: the rest of one that the prompt has begun, or one that may be there; "" if there is none."""
    if think is None or options.reasoning is False:
        return ""
    inside = f"inside[suffix={json.dumps(think[1])}]: /(?s:.*)/\nblanks: /[\\n ]{{0,4}}/"
    if tail.rstrip().endswith(think[0]):
        return f"thought: inside blanks\n{inside}"
    return f"thought: ({json.dumps(think[0])} inside blanks)?\n{inside}"


def refuse_required(
    options: ChatOptions, wanted: StructuredOutput | None, name: str
) -> StructuredOutput | None:
    """For formats whose calls no grammar describes. UsageError: a call is required."""
    if options.tool_choice in ("required", "named"):
        raise UsageError(
            f"tool_choice {options.tool_choice!r} is not supported by the chat format {name}: use auto"
        )
    return wanted
