"""What models write becomes messages: however the text is cut, whatever the arguments hold, and nothing is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.runtime.chat.answer import parsed
from gristmill.runtime.chat.conversation import ChatOptions, Delta, Tool
from gristmill.runtime.chat.formats import OutputParser, _bodies, find_format, formats
from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import UsageError

TOOLS = (
    Tool(
        "look", "", {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
    ),
    Tool("find.all-2", "", {}),
)
OPTIONS = ChatOptions(tools=TOOLS)
NASTY = [
    "</tool_call>",
    "<tool_call>",
    "</think>",
    '{"name": "x"}',
    "\\",
    '"',
    "}",
    "]",
    "<|eom_id|>",
    "</parameter",
    "```",
    "[TOOL_CALLS]",
    "<｜tool▁call▁end｜>",
    "é☃\U0001f600",
    "\n",
    " ",
]


@dataclass
class Said:
    """A message, joined from deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """The next delta."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.name:
                assert call.index == len(self.calls), "calls begin in order"
                assert call.id
                self.calls.append((call.name, call.arguments))
            else:
                name, arguments = self.calls[call.index]
                self.calls[call.index] = (name, arguments + call.arguments)


def parse(
    name: str, pieces: list[str], options: ChatOptions = OPTIONS, tail: str = ""
) -> tuple[Said, OutputParser]:
    """(what pieces of text say, the parser)."""
    parser = formats()[name].parser(options, tail)
    said = Said()
    for piece in pieces:
        said.add(parser.push(piece, [0]))
    said.add(parser.finish())
    return said, parser


def cut(text: str, at: list[int]) -> list[str]:
    """A text in pieces."""
    places = sorted({0, len(text), *(min(one, len(text)) for one in at)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As Qwen 3 writes."""
    text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    bodies = [
        f'<tool_call>\n{{"name": {dumped(n)}, "arguments": {dumped(a)}}}\n</tool_call>' for n, a in calls
    ]
    return (
        text
        + content
        + "\n".join(["" if content else None, *bodies][0 if content and calls else 1 :] or [""])
    )  # type: ignore[arg-type]


def _xml(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def coder(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As Qwen3-Coder writes."""
    text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    for name, arguments in calls:
        pairs = "".join(f"<parameter={k}>\n{_xml(v)}\n</parameter>\n" for k, v in arguments.items())
        content += f"\n<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"
    return text + content


def glm(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As GLM-4.5 writes."""
    text = f"<think>{thought}</think>\n" if thought else ""
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_xml(v)}</arg_value>\n" for k, v in arguments.items()
        )
        content += f"\n<tool_call>{name}\n{pairs}</tool_call>"
    return text + content


def deepseek(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As DeepSeek V3 writes."""
    text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumped(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return text + content + (f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else "")


def deepseek31(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As DeepSeek V3.1 writes."""
    text = f"<think>{thought}</think>" if thought else ""
    inner = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return text + content + (f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else "")


def mistral(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As Mistral wrote first."""
    text = f"[THINK]{thought}[/THINK]" if thought else ""
    listed = ", ".join(f'{{"name": {dumped(n)}, "arguments": {dumped(a)}}}' for n, a in calls)
    return text + content + (f"[TOOL_CALLS] [{listed}]" if calls else "")


def mistral_args(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As Mistral writes now."""
    text = f"[THINK]{thought}[/THINK]" if thought else ""
    return text + content + "".join(f"[TOOL_CALLS]{n}[ARGS]{dumped(a)}" for n, a in calls)


def llama(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As Llama 3 writes: calls or text."""
    listed = "; ".join(f'{{"name": {dumped(n)}, "parameters": {dumped(a)}}}' for n, a in calls)
    return listed if calls else content


def harmony(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As gpt-oss writes."""
    parts = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
    if content:
        parts.append(f"<|channel|>final<|message|>{content}")
    parts += [
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumped(a)}<|call|>"
        for n, a in calls
    ]
    return "<|start|>assistant".join(parts)


def gemma4(content: str, thought: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As Gemma 4 writes; keys that are no words stand between marks."""
    quote = '<|"|>'

    def shown(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            pairs = (
                f"{k if k.isidentifier() else f'{quote}{k}{quote}'}:{shown(v)}" for k, v in value.items()
            )
            return "{" + ",".join(pairs) + "}"
        return f"[{','.join(map(shown, value))}]" if isinstance(value, list) else dumped(value)

    text = f"<|channel>thought\n{thought}<channel|>" if thought else ""
    return text + content + "".join(f"<|tool_call>call:{n}{shown(a)}<tool_call|>" for n, a in calls)


Writer = Callable[[str, str, list[tuple[str, dict[str, Any]]]], str]
WRITERS: dict[str, tuple[str, Writer]] = {
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", coder),
    "glm": ("glm", glm),
    "deepseek_v3": ("deepseek_v3", deepseek),
    "deepseek_v31": ("deepseek_v31", deepseek31),
    "mistral": ("mistral", mistral),
    "mistral_args": ("mistral", mistral_args),
    "llama3": ("llama3", llama),
    "harmony": ("harmony", harmony),
    "gemma4": ("gemma4", gemma4),
}
IN_MARKS = ("qwen3_coder", "glm")
"""Formats whose values stand in marks without escapes: a value with such a mark cannot be written in them."""

plain_words = st.text(
    st.characters(codec="utf-8", exclude_characters="<[{|｜\x00", exclude_categories=("Cs",)), max_size=12
)
words = plain_words.map(str.strip)
texts = st.lists(st.one_of(st.sampled_from(NASTY), plain_words), max_size=4).map("".join)
values = st.recursive(
    st.one_of(texts, st.integers(-5, 5), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=4,
)
calls_of_json = st.lists(
    st.tuples(st.sampled_from(["look", "find.all-2"]), st.dictionaries(texts, values, max_size=3)), max_size=3
)
untyped = st.one_of(st.integers(-5, 5), st.lists(st.booleans(), max_size=2))
calls_in_marks = st.lists(
    st.tuples(
        st.just("look"), st.fixed_dictionaries({}, optional={"city": words, "n": st.integers(), "k": untyped})
    ),
    max_size=3,
)
"""The schema says that city is a text, and nothing of k."""


@pytest.mark.parametrize("which", WRITERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_messages_come_back_however_they_are_cut(which: str, data: st.DataObject) -> None:
    """Streamed in random pieces, character by character, and at once: the same message, the original one."""
    name, write = WRITERS[which]
    content, thought = data.draw(words), data.draw(words)
    calls = data.draw(calls_in_marks if which in IN_MARKS else calls_of_json)
    if which == "llama3" and calls:
        content = thought = ""
    if which == "llama3":
        thought = ""
    if which == "harmony" and not (content or thought or calls):
        return
    text = write(content, thought, calls)
    whole, _ = parse(name, [text])
    for pieces in (
        cut(text, data.draw(st.lists(st.integers(0, max(1, len(text))), max_size=12))),
        list(text),
    ):
        assert parse(name, pieces)[0] == whole
    assert whole.content == content
    assert whole.reasoning == thought
    assert [one for one, _ in whole.calls] == [one for one, _ in calls]
    assert [json.loads(made) for _, made in whole.calls] == [arguments for _, arguments in calls]


@settings(max_examples=150, deadline=None)
@example(which="llama3", pieces=["text", "<|eom_id|>", '{"name": "x"}'], places=[])
@example(
    which="hermes",
    pieces=['<tool_call>{"name": "x"}</tool_call>', "text", "</tool_call>", " more"],
    places=[],
)
@given(
    which=st.sampled_from(list(formats())),
    pieces=st.lists(
        st.one_of(
            st.sampled_from(NASTY),
            plain_words,
            st.sampled_from(
                [
                    '{"name": "look", "arguments": {',
                    '"a": 1',
                    "}}",
                    "<function=look>",
                    "<parameter=city>",
                    "<think>",
                    "<|channel|>final<|message|>",
                    "[ARGS]",
                    "<｜tool▁call▁begin｜>",
                    "<｜tool▁sep｜>",
                    "<|tool_call>call:look{",
                    'city:<|"|>Par',
                    '<|"|>,n:[1,{',
                    "<|channel>thought",
                    "<channel|>",
                ]
            ),
        ),
        max_size=12,
    ),
    places=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_text_is_parsed_and_does_not_depend_on_its_pieces(
    which: str, pieces: list[str], places: list[int]
) -> None:
    """Broken tags, broken JSON: no exception, and the same however it is cut."""
    text = "".join(pieces)
    whole, parser = parse(which, [text])
    other, again = parse(which, cut(text, places))
    assert other == whole
    assert (again.calls, again.open_call) == (parser.calls, parser.open_call)
    assert parse(which, list(text))[0] == whole


@settings(max_examples=150, deadline=None)
@given(text=texts, which=st.sampled_from(["hermes", "qwen3_coder", "llama3", "mistral", "think", "plain"]))
def test_nothing_is_lost_without_tools(text: str, which: str) -> None:
    """Calls are text where there are no tools; only thoughts are parsed."""
    if any(tag in text for tag in ("think>", "[THINK", "[/THINK", "<|e")):
        return
    said, _ = parse(which, list(text), ChatOptions())
    assert said.content == text


@pytest.mark.parametrize(
    ("text", "content", "calls", "open_call"),
    [
        ("<tool_call>nonsense</tool_call> x", "<tool_call>nonsense x", [], False),
        ('<tool_call>{"name": "look"', '<tool_call>{"name": "look"', [], False),
        ('<tool_call>{"name": "look", "arguments": {"ci', "", [("look", '{"ci')], True),
        ('<tool_call>{"name": "look"}</tool_call>', "", [("look", "{}")], False),
        ('<tool_call>{"arguments": {"a": 1}, "name": "look"}</tool_call>', "", [("look", '{"a": 1}')], False),
        (
            '<tool_call>{"name": "look", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("look", '{"a": 1}')],
            False,
        ),
        ('<tool_call>{"name": "look", "arguments": null}</tool_call>', "", [("look", "{}")], False),
        ("one <tool", "one <tool", [], False),
        (
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}',
            [],
            False,
        ),
    ],
)
def test_broken_calls(text: str, content: str, calls: list[tuple[str, str]], open_call: bool) -> None:
    """What is no call is text; a cut one is open."""
    for pieces in ([text], list(text)):
        said, parser = parse("hermes", pieces)
        assert (said.content, said.calls, parser.open_call) == (content, calls, open_call)


FURTHER = {
    "hermes": (hermes, "\n</tool_call>\n<tool_call>\n", '{"name": "'),
    "qwen3_coder": (coder, "\n</tool_call>\n<tool_call>\n", "<function=lo"),
    "glm": (glm, "\n<tool_call>", "lo"),
}
"""What writes a call, what is between two, and the beginning of another one."""


@pytest.mark.parametrize("which", FURTHER)
def test_a_further_call_that_is_cut_is_no_text(which: str) -> None:
    """Wherever it is cut before its name is known; what a model says after a call is text."""
    write, joint, begin = FURTHER[which]
    first = write("", "", [("look", LOOK)]).removesuffix("\n</tool_call>" * (which != "glm"))
    for end in range(len(joint + begin) + 1):
        text = first + (joint + begin)[:end]
        for pieces in ([text], list(text)):
            said, _ = parse(which, pieces)
            assert (said.content, [name for name, _ in said.calls]) == ("", ["look"]), text
    for rest in ("a <", "<b", "<tool_call"):
        said, _ = parse(which, [f"{first}\n</tool_call>" * (which != "glm") or first, f"\nsee {rest}"])
        assert said.content == f"see {rest}"


LOOK = {"city": "Paris", "n": 5}
CLOSED = {
    "hermes": (hermes, "</tool_call>"),
    "qwen3_coder": (coder, "</function>"),
    "glm": (glm, "</tool_call>"),
    "harmony": (harmony, "<|call|>"),
}
"""What writes a call, and a text that ends it."""


@pytest.mark.parametrize("which", CLOSED)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_a_call_or_ends_it(which: str, include: bool) -> None:
    """A call that lacks a part of its arguments is none that a client may make."""
    write, end = CLOSED[which]
    text = write("", "", [("look", LOOK)])
    for stop, ends in ((end, "tool_calls"), ("aris", "stop"), ("Paris", "stop")):
        shown = text[: text.index(stop) + len(stop) * include]
        said, parser = Said(), formats()[which].parser(OPTIONS, "")
        part = parsed(parser, Chunk(0, (1,), shown, "stop", stop_reason=stop))
        said.add(part.delta)
        assert part.finish_reason == ends
        assert [name for name, _ in said.calls] == ["look"] and said.content == ""
        if ends == "tool_calls":
            assert json.loads(said.calls[0][1]) == LOOK
    ended = parsed(formats()[which].parser(OPTIONS, ""), Chunk(0, (1,), text, "stop", stop_reason=7))
    assert ended.finish_reason == "tool_calls"


@pytest.mark.parametrize("stop", [None, 7])
@pytest.mark.parametrize("which", CLOSED)
def test_a_token_that_ends_a_call_early_cuts_it(which: str, stop: int | None) -> None:
    """An end token of the model, or one of the client's: what is without it is whole, or no call to make. The tokens are no text."""
    text = CLOSED[which][0]("", "", [("look", LOOK)]).removesuffix("<|call|>")
    cuts = {"stop": text.index("aris"), "tool_calls": len(text)}
    for pieces in ([cuts["stop"]], [3, 20, 40]):
        for finish, end in cuts.items():
            parser = formats()[which].parser(OPTIONS, "")
            *first, last = cut(text[:end], pieces)
            for piece in first:
                parser.push(piece)
            part = parsed(parser, Chunk(0, (7,), last, "stop", stop_reason=stop))
            assert (part.finish_reason, parser.calls) == (finish, 1), text[:end]
            cut_off = parsed(parser, Chunk(0, (7,), "", "length"))
            assert cut_off.finish_reason == "length"


def test_arguments_grow_as_they_come() -> None:
    """A client sees them long before the end."""
    parser = formats()["hermes"].parser(OPTIONS, "")
    parser.push('<tool_call>\n{"name": "look", "arguments": {"city": "Par')
    assert parser.push("is, ").calls[0].arguments == "is, "


@pytest.mark.parametrize(
    "value", ["a <b> " * 5000, '{"b": "\\\\ </parameter> \\""} ' * 1500, "[1, 2] " * 4000]
)
def test_long_values_are_read_once(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a value is and however small its pieces, each character is looked at once, but for what may begin a mark."""
    looked_at = 0
    scan = _bodies.Value._scan

    def counted(self: _bodies.Value, text: str) -> str | None:
        nonlocal looked_at
        looked_at += len(text)
        return scan(self, text)

    monkeypatch.setattr(_bodies.Value, "_scan", counted)
    call = f"<tool_call>\n<function=look>\n<parameter=n>\n{value}\n</parameter>\n</function>\n</tool_call>"
    said, _ = parse("qwen3_coder", list(call))
    assert [json.loads(arguments) for _, arguments in said.calls] == [{"n": value}]
    assert len(value) < looked_at < 6 * len(value)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("{}", {}),
        ('{city:<|"|>a "b" \\ {c}\n<|"|>,n:1}', {"city": 'a "b" \\ {c}\n', "n": 1}),
        ('{"city": "a \\"b\\" <|", "n": [1, null]}', {"city": 'a "b" <|', "n": [1, None]}),
        ("{n:-1.5e3,a:true,b:None,c:[],d:{},e:[[1],{f:false}]}",)
        + ({"n": -1500.0, "a": True, "b": None, "c": [], "d": {}, "e": [[1], {"f": False}]},),
        ("{city: New York , n : 2}", {"city": "New York", "n": 2}),
        ('{<|"|>a:b<|"|>:NaN}', {"a:b": "NaN"}),
    ],
)
def test_arguments_of_gemma_4(inside: str, arguments: dict[str, Any]) -> None:
    """Marks or JSON, bare values, and what is no JSON as a text."""
    for pieces in (
        [f"a<|tool_call>call:look{inside}<tool_call|>"],
        [*f"a<|tool_call>call:look{inside}<tool_call|>"],
    ):
        said, parser = parse("gemma4", pieces)
        assert (said.content, [name for name, _ in said.calls], parser.open_call) == ("a", ["look"], False)
        assert json.loads(said.calls[0][1]) == arguments
    # Planted: a call that is no object, and one that is cut.
    assert parse("gemma4", ["<|tool_call>look"])[0].calls == []
    assert parse("gemma4", ["<|tool_call>call:look{city:"])[1].open_call


def test_thoughts() -> None:
    """Opened by the prompt, cut, repeated by the model, counted."""
    said, parser = parse(
        "hermes", ["I ", "see.", "</think>", "\n\nYes."], tail="<|im_start|>assistant\n<think>\n"
    )
    assert (said.reasoning, said.content) == ("I see.", "Yes.")
    assert parser.reasoning_tokens == 3
    assert parse("hermes", ["<think>", "I see."], tail="<think>\n")[0].reasoning == "I see."
    assert parse("hermes", ["I see"], tail="<think>")[0] == Said("", "I see")
    assert parse("think", ["<thi", "nk>a</th", "ink>b"])[0] == Said("b", "a")
    assert parse("gemma4", ["I see.<channel|>Yes."], tail="<|channel>thought\n")[0] == Said("Yes.", "I see.")
    assert parse("gemma4", ["Yes."], tail="<|channel>thought\n<channel|>")[0] == Said("Yes.")


@pytest.mark.parametrize("pieces", [list, lambda text: [text]], ids=["characters", "whole"])
def test_harmony_begins_with_a_recipient_or_with_text(pieces: Callable[[str], list[str]]) -> None:
    """A message to a tool may have its recipient before its channel, right behind the prompt; what looks like it is text."""
    header = " to=functions.look<|channel|>commentary <|constrain|>json<|message|>"
    assert parse("harmony", pieces(header + '{"n": 1}<|call|>'))[0] == Said("", "", [("look", '{"n": 1}')])
    for text in ("to=functions.look", " to=5 is", "t", "to", "to=look <b>", "to="):
        assert parse("harmony", pieces(text))[0] == Said(text), text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}<function=x><parameter=y>", "qwen3_coder"),
        ("<tool_call> {{ x }}", "hermes"),
        ("<tool_call><arg_key><arg_value>", "glm"),
        ("<｜tool▁call▁begin｜>function```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>", "deepseek_v31"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|channel|><|message|>", "harmony"),
        ("<|tool_call>call: <|channel>thought", "gemma4"),
        ("<|start_header_id|>'parameters'", "llama3"),
        ("<think>", "think"),
        ("{{ messages }}", "plain"),
    ],
)
def test_formats_are_found_by_the_template(template: str, name: str) -> None:
    """By their marks; a name wins; an unknown one has a hint."""
    assert find_format(template).name == name
    assert find_format(template, "hermes").name == "hermes"
    with pytest.raises(UsageError, match="did you mean hermes"):
        find_format(template, "herms")


def test_a_parser_that_depends_on_pieces_is_noticed() -> None:
    """The comparison above fails for one that looks at each piece alone."""

    class Naive:
        reasoning_tokens, calls, open_call = 0, 0, False

        def push(self, text: str, ids: Any = ()) -> Delta:
            return Delta(text.replace("<think>", ""))

        def finish(self) -> Delta:
            return Delta()

    def said(pieces: list[str]) -> str:
        parser = Naive()
        return "".join(parser.push(piece).content for piece in pieces)

    assert said(["<think>a"]) != said(["<th", "ink>a"])
