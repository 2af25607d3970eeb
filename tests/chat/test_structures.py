"""What a required call or a response format allows is a message of its format by construction, whichever tokens are drawn."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from gristmill.runtime.chat.conversation import ChatOptions, Tool
from gristmill.runtime.chat.formats import formats
from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammar_parts import text_part, until_part
from gristmill.runtime.grammars import GrammarCompiler
from gristmill.runtime.structured_output import StructuredOutput
from tests.chat.test_formats import Said
from tests.runtime.oracle import LLAMA, MODELS

pytest.importorskip("llguidance")

TOOLS = (
    Tool(
        "look",
        "",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["°C", "K"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
                "place": {"$ref": "#/$defs/Place"},
            },
            "required": ["unit", "days", "place"],
            "additionalProperties": False,
            "$defs": {
                "Place": {
                    "type": "object",
                    "properties": {"north": {"type": "boolean"}},
                    "required": ["north"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    Tool("wait.now-2", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)
SPECIAL = [
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
    *("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
]
DEEPSEEK = [
    f"<｜{name}｜>"
    for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"]
WITH_CALLS = [name for name in formats() if name not in ("plain", "think")]
ENDS = [
    "STOP",
    '"',
    '"}',
    "\n</parameter>\n",
    "</arg_value>\n",
    "</think>",
    "[/THINK]",
    "<|end|>",
    "<channel|>",
]
"""What ends a text, which random tokens would hardly do."""


@cache
def vocabulary(special: bool) -> tuple[Tokenizer, GrammarCompiler, int]:
    """The example's tokenizer with the tokens of all formats; DeepSeek's as special ones or not."""
    made = json.loads((MODELS / LLAMA / "tokenizer.json").read_text())
    added = (
        [(one, True) for one in SPECIAL]
        + [(one, special) for one in DEEPSEEK]
        + [(one, False) for one in PLAIN]
    )
    size = max(made["model"]["vocab"].values()) + 1
    for i, (text, is_special) in enumerate(added):
        made["added_tokens"].append(
            {"id": size + i, "content": text, "special": is_special}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        )
    text = json.dumps(made)
    tokenizer = Tokenizer.from_str(text)
    return tokenizer, GrammarCompiler(text, size + len(added), [1]), size + len(added)


def drawn(output: StructuredOutput, seed: int, special: bool = True) -> str:
    """A random text of a grammar, whole."""
    tokenizer, compiler, size = vocabulary(special)
    matcher = compiler.compile(output).matcher
    ends = [tokenizer.encode(one, add_special_tokens=False).ids for one in ENDS]
    chance, ids = random.Random(seed), []  # type: random.Random, list[int]
    while not matcher.is_stopped():
        assert len(ids) < 3000, tokenizer.decode(ids, skip_special_tokens=False)
        ending = chance.random() < 0.5
        fitting = [one for one in ends if matcher.validate_tokens(one) == len(one)] if ending else []
        if fitting:
            step = chance.choice(fitting)
        else:
            bias = matcher.compute_logit_bias()
            fit = np.flatnonzero(np.frombuffer(bias, np.uint8, size))
            allowed = fit[fit != 1]
            ends_here = bool(bias[1]) and (not len(allowed) or chance.random() < 0.4)
            step = [1] if ends_here else [int(allowed[chance.randrange(len(allowed))])]
        assert matcher.consume_tokens(step), matcher.get_error()
        ids += step
    assert not matcher.is_error(), matcher.get_error()
    return tokenizer.decode([one for one in ids if one != 1], skip_special_tokens=False)


def said(name: str, text: str, options: ChatOptions, tail: str) -> tuple[Said, bool]:
    """(the message, whether a call is open)."""
    parser, message = formats()[name].parser(options, tail), Said()
    for character in text:
        message.add(parser.push(character))
    message.add(parser.finish())
    return message, parser.open_call


def fits(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the arguments match the schema of a tool."""
    if name == "wait.now-2":
        return arguments == {}
    return (
        arguments["unit"] in ("°C", "K")
        and 0 <= arguments["days"] <= 99
        and list(arguments["place"]) == ["north"]
        and isinstance(arguments.get("city", ""), str)
        and arguments.keys() <= {"city", "unit", "days", "place"}
    )


@pytest.mark.parametrize("tail", ["", "<think>\n"], ids=["quiet", "thinking"])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_required_calls_parse(name: str, tail: str) -> None:
    """At least one call, of the tools, with arguments that match; nothing else is said. One where one is asked for."""
    several = 0
    for seed in range(4):
        for more in (
            {"tool_choice": "required"},
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": "named", "tool_name": "wait.now-2"},
        ):
            options = ChatOptions(tools=TOOLS, **more)
            structure = formats()[name].structure(options, None, tail)
            assert structure is not None
            text = drawn(structure, seed, special=seed % 2 == 0)
            message, cut = said(name, text, options, tail)
            assert message.calls, text
            assert not cut, text
            assert not message.content.strip(), text
            assert all(fits(one, json.loads(arguments)) for one, arguments in message.calls), text
            if len(more) > 1:
                assert len(message.calls) == 1, text
            if "tool_name" in more:
                assert message.calls[0][0] == "wait.now-2"
            several += len(message.calls) > 1
    assert several or name == "harmony"


@pytest.mark.parametrize("tail", ["", "<think>\n"], ids=["quiet", "thinking"])
@pytest.mark.parametrize("name", [*WITH_CALLS, "think"])
def test_response_formats_follow_thoughts(name: str, tail: str) -> None:
    """The content is what the request asks for; the thought is not in it."""
    for seed, wanted in enumerate(
        (
            StructuredOutput(json_schema={"type": "object", "properties": {}, "additionalProperties": False}),
            StructuredOutput(choice=["{}", "{ }"]),
            StructuredOutput(regex=r"\{ ?\}"),
        )
    ):
        structure = formats()[name].structure(ChatOptions(), wanted, tail)
        assert structure is not None
        text = drawn(structure, seed)
        message, _ = said(name, text, ChatOptions(), tail)
        assert json.loads(message.content) == {}, text
    both = ChatOptions(tools=TOOLS, tool_choice="required")
    with pytest.raises(UsageError):
        formats()[name].structure(both, wanted, tail)


WRONG = (
    Tool(
        "look",
        "",
        {
            "type": "object",
            "properties": {"days": {"type": "integer"}},
            "required": ["days"],
            "additionalProperties": False,
        },
    ),
    Tool("other", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)
"""Tools that a model makes up: a name that there is not, and a schema that is not the one of `TOOLS`."""
STRICT = tuple(replace(tool, strict=True) for tool in TOOLS)
PRELUDES = (
    "",
    "Let me see.\n",
    "<",
    "<tool",
    "[TOOL_CALLS",
    "<|channel|>commentary<|message|>I see<|end|><|start|>assistant",
)


def taken(structure: StructuredOutput, text: str, special: bool) -> str:
    """As much of a text as a grammar lets a model say that tries to say it: token by token, and spelled in characters."""
    tokenizer, compiler, _ = vocabulary(special)
    matcher = compiler.compile(structure).matcher
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    count = matcher.validate_tokens(ids)
    if count < len(ids):
        return tokenizer.decode(ids[:count], skip_special_tokens=False)
    assert matcher.consume_tokens(ids)
    return text if matcher.is_accepting() else text[:-1]


@pytest.mark.parametrize("tail", ["", "<think>\n"], ids=["quiet", "thinking"])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_strict_calls_of_free_choice(name: str, tail: str) -> None:
    """A model that tries to calls no wrong tool and gives no wrong arguments; right calls, and text, come out whole."""
    if name in ("llama3", "harmony") and tail:
        tail = ""  # their thoughts do not begin in the prompt
    options = ChatOptions(tools=STRICT)
    structure = formats()[name].structure(options, None, tail)
    assert structure is not None
    thought = "</think>" if tail and name not in ("mistral", "gemma4") else ""
    right = refused = 0
    for seed in range(8):
        special = seed % 2 == 0
        for tools, sound in ((TOOLS, True), (WRONG, False)):
            required = formats()[name].structure(ChatOptions(tools=tools, tool_choice="required"), None, "")
            assert required is not None
            said_first = PRELUDES[seed % len(PRELUDES)]
            text = f"{thought}{said_first if name != 'llama3' else ''}{drawn(required, seed, special)}"
            message, _ = said(name, out := taken(structure, text, special), options, tail)
            right += sound and out == text and bool(message.calls)
            refused += not sound and out != text
            for tool, arguments in message.calls if out == text else message.calls[:-1]:
                assert tool in ("look", "wait.now-2"), text
                assert fits(tool, json.loads(arguments)), text
    assert right, "no right call came out"
    assert refused, "no wrong call was tried"
    plain = f"{thought}{'<|channel|>final<|message|>' if name == 'harmony' else ''}It is sunny."
    assert taken(structure, plain, True) == plain


MARKED = (
    "<tool_call> [TOOL_CALLS] <think> <|end|> <|python_tag|> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>"
)
"""What an answer may quote, and is no call in it."""
ANSWERS = (
    StructuredOutput(
        json_schema={
            "type": "object",
            "properties": {"said": {"type": "string"}},
            "required": ["said"],
            "additionalProperties": False,
        }
    ),
    StructuredOutput(choice=["yes", "no/never"]),
    StructuredOutput(regex=r"a\/b/c|<[^|]*"),
)


def answers(wanted: StructuredOutput, content: str) -> bool:
    """Whether a content is what a request wants."""
    if wanted.json_schema is not None:
        return list(json.loads(content)) == ["said"]
    if wanted.choice is not None:
        return content in wanted.choice
    return re.fullmatch(str(wanted.regex), content) is not None


@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}], ids=["several", "one"])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_or_an_answer_in_its_format(name: str, more: dict[str, Any]) -> None:
    """Beside a response format, a message is calls that match their schemas, or the answer, which may quote what begins a call."""
    calls = contents = 0
    for wanted in ANSWERS[: 2 if name == "llama3" else 3]:
        options = ChatOptions(tools=TOOLS, answer_bound=True, **more)
        structure = formats()[name].structure(options, wanted, "")
        assert structure is not None
        for seed in range(6):
            text = drawn(structure, seed, special=seed % 2 == 0)
            message, cut = said(name, text, options, "")
            assert not cut, text
            assert all(fits(one, json.loads(arguments)) for one, arguments in message.calls), text
            assert not more or len(message.calls) < 2, text
            assert bool(message.calls) != bool(message.content.strip()), text
            assert message.calls or answers(wanted, message.content), text
            calls += bool(message.calls)
            contents += not message.calls
        required = formats()[name].structure(ChatOptions(tools=WRONG, tool_choice="required"), None, "")
        assert required is not None
        wrong = drawn(required, 1)
        message, _ = said(name, out := taken(structure, wrong, True), options, "")
        assert out != wrong
        assert not any(fits(one, _loaded(arguments)) for one, arguments in message.calls), out
    assert calls, "no call came out"
    assert contents, "no answer came out"
    quoted = json.dumps({"said": MARKED}, ensure_ascii=False)
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    message, _ = said(name, head + quoted, ChatOptions(tools=TOOLS, answer_bound=True), "")
    assert message.content == quoted
    assert not message.calls


def _loaded(arguments: str) -> Any:
    try:
        return {"unit": None, "days": -1} | json.loads(arguments)
    except ValueError:
        return {"unit": None, "days": -1}


def test_answers_that_could_be_calls_are_refused() -> None:
    """Where the parser could not tell an answer from a call, or a request's own grammar has the calls in it."""
    options = ChatOptions(tools=TOOLS)
    for name, wanted in (
        ("llama3", StructuredOutput(json_schema={"type": "object"})),
        ("llama3", StructuredOutput(json_schema='{"type": "object", "properties": {"name": {}}}')),
        ("llama3", StructuredOutput(choice=['{"name": "x"}'])),
        ("llama3", StructuredOutput(regex=".*")),
        ("hermes", StructuredOutput(choice=["yes", " <tool_call>no"])),
    ):
        with pytest.raises(UsageError, match="beside tools"):
            formats()[name].structure(options, wanted, "")
        assert formats()[name].structure(replace(options, tool_choice="none"), wanted, "") is not None
    for wanted in OWN:
        for bound in (ChatOptions(tools=STRICT), ChatOptions(tools=TOOLS, parallel_tool_calls=False)):
            with pytest.raises(UsageError, match="describes a whole message"):
                formats()["hermes"].structure(bound, wanted, "")
        assert formats()["llama3"].structure(options, wanted, "") is wanted
    regex = formats()["hermes"].structure(options, StructuredOutput(regex="(?s:.*)"), "")
    assert regex is not None
    tokenizer, compiler, _ = vocabulary(True)
    for before, fits_it in (("", False), ("\n ", False), (".", True)):
        pieces = (before, "<tool", "_call>", "x")  # spelled: the tag as one token is no text
        ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids]
        assert (compiler.compile(regex).matcher.validate_tokens(ids) == len(ids)) is fits_it


@pytest.mark.parametrize("name", WITH_CALLS)
def test_at_most_one_call_of_free_choice(name: str) -> None:
    """Without parallel calls, a model that tries two gets one."""
    options = ChatOptions(tools=TOOLS, parallel_tool_calls=False)
    structure = formats()[name].structure(options, None, "")
    required = formats()[name].structure(ChatOptions(tools=TOOLS, tool_choice="required"), None, "")
    assert structure is not None
    assert required is not None
    assert formats()[name].structure(ChatOptions(tools=TOOLS), None, "") is None
    several = 0
    for seed in range(8):
        text = drawn(required, seed)
        count = len(said(name, text, options, "")[0].calls)
        several += count > 1
        message, _ = said(name, out := taken(structure, text, True), options, "")
        assert len(message.calls) == 1
        assert (out == text) == (count == 1), text
    assert several or name == "harmony"


def test_strict_tools_that_a_format_cannot_keep() -> None:
    """They are refused by name: no grammar, or one that does not hold texts to a pattern."""
    pattern = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}}}
    for name in ("qwen3_coder", "glm"):
        for more in (pattern, {"anyOf": [{}]}, {"required": ["x"]}, {"additionalProperties": True}):
            tool = Tool("look", "", more, strict=True)
            with pytest.raises(UsageError, match="'look' is strict"):
                formats()[name].structure(ChatOptions(tools=(tool,)), None, "")
            assert (
                formats()[name].structure(ChatOptions(tools=(replace(tool, strict=False),)), None, "") is None
            )
    for name in ("plain", "think"):
        with pytest.raises(UsageError, match="strict"):
            formats()[name].structure(ChatOptions(tools=STRICT), None, "")


OWN = (
    StructuredOutput(grammar='start: "{" inner "}"\ninner: /[0-9]{2}/ | %json {"type": "boolean"}'),
    StructuredOutput(
        structural_tag={
            "structures": [
                {
                    "begin": "<fn=x>",
                    "schema": {"type": "object", "properties": {}, "additionalProperties": False},
                    "end": "</fn>",
                }
            ],
            "triggers": ["<fn="],
        }
    ),
)


@pytest.mark.parametrize("name", [*WITH_CALLS, "think"])
def test_own_grammars_follow_thoughts(name: str) -> None:
    """A request's own grammar and tags bind what follows the thought, and nothing in it."""
    tail = "" if name in ("llama3", "harmony", "mistral", "gemma4") else "<think>\n"
    begin, end = {
        "mistral": ("[THINK]", "[/THINK]"),
        "gemma4": ("<|channel>thought\n", "<channel|>"),
        "llama3": ("", ""),
        "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    }.get(name, ("", "</think>\n"))
    thought = f"{begin}Is it {{x}}, or <fn=x>?{end}" if end else ""
    for wanted, good, bad in ((OWN[0], "{17}", "{x}"), (OWN[1], "So <fn=x>{}</fn>.", "So <fn=x>{1}</fn>.")):
        structure = formats()[name].structure(ChatOptions(), wanted, tail)
        assert structure is not None
        assert taken(structure, thought + good, True) == thought + good
        assert taken(structure, thought + bad, True) != thought + bad
        message, _ = said(name, thought + good, ChatOptions(), tail)
        assert message.content.strip() == good


def test_wrong_grammars_are_noticed() -> None:
    """A call without its end is open, arguments of another schema do not fit, and quoted text is no token."""
    options = ChatOptions(tools=TOOLS, tool_choice="required")
    begun = text_part("<tool_call>") + ' "{\\"name\\": \\"look\\", \\"arguments\\": {"'
    assert said("hermes", drawn(StructuredOutput(grammar=f"start: {begun}"), 0), options, "")[1]
    assert not fits("wait.now-2", {"days": 1})
    assert not fits("look", {"unit": "F", "days": 1, "place": {"north": True}})
    with pytest.raises(AssertionError, match="doesn't satisfy"):
        drawn(StructuredOutput(grammar='start: "<tool_call>"'), 0)


def test_parts_follow_the_tokenizer() -> None:
    """Without the tokens, the same parts are characters; a quote or a line's end in them is kept."""
    odd = 'a "quoted"\n\\ <tool_call> <no_token>'
    assert drawn(StructuredOutput(grammar=f"start: {text_part(odd)}"), 0) == odd
    for end in ("</think>", "STOP"):
        text = drawn(StructuredOutput(grammar=f"start: {until_part(end)} {text_part('.')}"), 1)
        assert text.endswith(f"{end}.")
        assert text.count(end) == 1


@pytest.mark.parametrize("trigger", ["<tool_call>", "[TOOL_CALLS]", "<fn="])
def test_tags_in_free_text_may_be_tokens(trigger: str) -> None:
    """A structural tag that begins and ends with tokens of the vocabulary, or with characters."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tag = {"begin": f"{trigger}x>", "schema": schema, "end": "</tool_call>"}
    output = StructuredOutput(structural_tag={"structures": [tag], "triggers": [trigger]})
    tokenizer, compiler, _ = vocabulary(True)
    wanted = f"So: {trigger}x>{{}}</tool_call> Done."
    ids = tokenizer.encode(wanted, add_special_tokens=False).ids
    assert compiler.compile(output).allowed(ids) == len(ids)
    wrong = tokenizer.encode(f"So: {trigger}y", add_special_tokens=False).ids
    assert compiler.compile(output).allowed(wrong) < len(wrong)


def test_the_recipe_of_a_format() -> None:
    """The file of CONTRIBUTING.md: what it requires is what it parses."""
    [source] = re.findall(
        r"```python\n(# runtime/chat/formats/.*?)```",
        (MODELS.parents[1] / "CONTRIBUTING.md").read_text(),
        re.S,
    )
    module: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(source, "recipe", "exec"), module)
    options = ChatOptions(tools=TOOLS, tool_choice="required")
    for seed in range(3):
        output = module["FORMAT"].structure(options, None, "")
        text, parser, message = drawn(output, seed), module["FORMAT"].parser(options, ""), Said()
        for character in text:
            message.add(parser.push(character))
        message.add(parser.finish())
        assert message.calls, text
        assert not message.content.strip(), text
        assert not parser.open_call
        assert all(fits(one, json.loads(arguments)) for one, arguments in message.calls), text
