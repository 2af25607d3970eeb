"""Parts of grammars, in llguidance's dialect of Lark: structural tags, and rules that depend on a tokenizer's added tokens.

A rule names such a part by a mark (`text_part` and its like), which `resolve_parts` replaces once the vocabulary is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tag:
    """JSON text of a schema between two texts; the first starts with the trigger."""

    trigger: str
    begin: str
    schema: str
    end: str


def parse_tags(value: Mapping[str, Any] | str) -> list[Tag]:
    """The tags of a `structural_tag`; UsageError if it is not one."""
    form = (
        "{'structures': [{'begin': text, 'schema': JSON schema, 'end': text}, ...], 'triggers': [text, ...]}"
    )

    def require(sound: bool, what: str, got: object) -> None:
        if not sound:
            raise UsageError(f"structural_tag must be {form}: {what}, got {got!r}")

    try:
        parsed: Any = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UsageError(f"structural_tag is not JSON: {error}") from error
    require(isinstance(parsed, Mapping), "a mapping is expected", parsed)
    known = {"structures", "triggers", "type"}
    require(
        set(parsed) <= known and parsed.get("type", "structural_tag") == "structural_tag",
        "other entries",
        parsed,
    )
    structures, triggers = parsed.get("structures", ()), parsed.get("triggers", ())
    require(isinstance(triggers, Sequence) and not isinstance(triggers, str), "triggers are texts", triggers)
    require(
        all(isinstance(t, str) and t for t in triggers), "triggers are texts, none of them empty", triggers
    )
    require(isinstance(structures, Sequence) and len(structures) > 0, "at least one structure", structures)
    tags = []
    for one in structures:
        require(isinstance(one, Mapping) and set(one) == {"begin", "schema", "end"}, "a structure", one)
        begin, schema, end = one["begin"], one["schema"], one["end"]
        require(isinstance(begin, str) and isinstance(end, str), "begin and end are texts", one)
        require(isinstance(schema, str | Mapping), "schema is a mapping or text", schema)
        trigger = next((t for t in triggers if begin.startswith(t)), "")
        require(bool(trigger), f"begin starts with a trigger of {list(triggers)}", begin)
        try:
            text = json.dumps(json.loads(schema) if isinstance(schema, str) else dict(schema))
        except (TypeError, ValueError) as error:
            raise UsageError(f"structural_tag: the schema after {begin!r} is not JSON: {error}") from error
        tags.append(Tag(trigger, begin, text, end))
    return tags


def tag_grammar(tags: Sequence[Tag], added: Collection[str]) -> str:
    """Lark, in llguidance's dialect: text up to a trigger, lazily, the rest of its tag, and so on; then text to the end. `added` has the texts
    that are tokens of their own, which text does not contain.
    """
    names = " | ".join(f"tag_{i}" for i in range(len(tags)))
    lines = [f"start: ({names})* tail", "tail: TEXT", r"TEXT: /(.|\n)*/"]
    for i, tag in enumerate(tags):
        head = f"TEXT {text_part(tag.trigger)}"
        if not tag.trigger.startswith(tuple(added)):
            lines.append(f"head_{i}[lazy]: TEXT {quoted(tag.trigger)}")
            head = f"head_{i}"
        rest, end = text_part(tag.begin.removeprefix(tag.trigger)), text_part(tag.end)
        lines.append(f"tag_{i}: {head} {rest} %json {tag.schema} {end}")
    return "\n".join(lines)


_PART = re.compile(r'@(?P<kind>text|until|free|tags)\((?P<texts>"(?:\\.|[^"\\])*"(?:, "(?:\\.|[^"\\])*")*)\)')
"""Parts of rules that depend on the tokenizer."""


def quoted(text: str) -> str:
    """A text in quotes. Characters stand as they are, but for controls, which the dialect refuses: of these JSON leaves one as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def text_part(text: str) -> str:
    """A part of a grammar's rule: this text as the model's tokenizer has it, by the added tokens in it, which quoted text never matches."""
    return f"@text({quoted(text)})"


def until_part(end: str, *never: str) -> str:
    """A part of a grammar's rule: any text up to the first `end`, which is as in `text_part`, and belongs to it. It has none of `never` in it."""
    return f"@until({_quoted(end, *never)})"


def free_part(*never: str) -> str:
    """A part of a grammar's rule: any text that has none of these in it, neither as characters nor as tokens."""
    return f"@free({_quoted(*never)})"


def tags_part(structural_tag: Mapping[str, Any] | str) -> str:
    """A part of a grammar's rule: what a `StructuredOutput.structural_tag` describes."""
    text = structural_tag if isinstance(structural_tag, str) else json.dumps(dict(structural_tag))
    return f"@tags({_quoted(text)})"


def _quoted(*texts: str) -> str:
    return ", ".join(map(quoted, texts))


def resolve_parts(grammar: str, added: Mapping[str, int]) -> str:
    """A grammar with its parts, of `text_part` and the like, written out for a vocabulary with these added tokens."""
    names = "|".join(re.escape(name) for name in sorted(added, key=len, reverse=True))
    token = re.compile(f"({names})") if names else None
    rules: list[str] = []

    def written(text: str) -> str:
        pieces = [piece for piece in (token.split(text) if token else [text]) if piece]
        return " ".join(f"<[{added[piece]}]>" if piece in added else quoted(piece) for piece in pieces)

    def without(texts: Sequence[str]) -> str:
        """A terminal: text in which these do not stand, as other text has no added tokens."""
        if not texts:
            return "/(?s:.*)/"
        any_of = "|".join(re.escape(text).replace("/", "\\/") for text in texts)
        rules.append(f"WITHOUT_{len(rules)}: /(?s:.*)/ & ~/(?s:.*)({any_of})(?s:.*)/")
        return rules[-1].partition(":")[0]

    def replaced(match: re.Match[str]) -> str:
        text, *never = texts = json.loads(f"[{match['texts']}]")
        if match["kind"] == "text":
            return written(text)
        if match["kind"] == "tags":
            return f"%lark {{\n{_PART.sub(replaced, tag_grammar(parse_tags(text), added))}\n}}"
        if match["kind"] == "free":
            return without(texts)
        if token and token.match(text):  # spelled in characters, it would be read as the same
            return f"{without(texts)} {written(text)}"
        body = without(never)
        rules.append(f"until_{len(rules)}[suffix={quoted(text)}]: {body}")
        return rules[-1].partition("[")[0]

    return "\n".join([_PART.sub(replaced, grammar), *rules])
