"""Structured output: an output that a JSON schema, a regular expression, a grammar, a list of choices or tags in text describe, by llguidance.

A grammar bars, before each token is sampled, the tokens that cannot go on (Willard and Louf, 2023, arXiv:2307.09702; llguidance computes
the mask from the parser's state at every step, so nothing is prepared for each grammar).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gristmill.runtime.declared_names import require_fields
from gristmill.runtime.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


@dataclass(frozen=True)
class StructuredOutput:
    """What an output looks like: exactly one of the five is given.

    Args:
        json_schema: a JSON schema, as a mapping or as text.
        regex: a regular expression that the whole output matches, in the syntax of Rust's regex crate.
        grammar: a context-free grammar in llguidance's dialect of Lark; its rule ``start`` is the output.
        choice: the output is one of these texts.
        structural_tag: free text with tagged JSON in it, such as calls of tools, in the form of vLLM's and SGLang's requests:
            ``{"structures": [{"begin": "<fn=add>", "schema": {...}, "end": "</fn>"}], "triggers": ["<fn="]}``, as a mapping or as text.
            After a trigger, the output continues as one of the structures whose ``begin`` starts with it.

    Raises:
        UsageError: none or several are given, or one of the wrong type.
    """

    json_schema: Mapping[str, Any] | str | None = field(default=None, hash=False)
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    structural_tag: Mapping[str, Any] | str | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise UsageError(
                f"structured output is one of json_schema, regex, grammar, choice and structural_tag, got {', '.join(given) or 'none'}"
            )
        [(name, value)] = given.items()
        if name == "choice":
            good = isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0
            if not good or not all(isinstance(text, str) and text for text in value):
                raise UsageError(f"choice must be texts of at least one character, got {value!r}")
        elif not (isinstance(value, str) or (name in _MAPPINGS and isinstance(value, Mapping))):
            raise UsageError(
                f"{name} must be {'a mapping or ' if name in _MAPPINGS else ''}text, got {value!r}"
            )
        elif name == "structural_tag":
            _tags(value)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StructuredOutput:
        """From a mapping with one of its fields. UsageError: it has another."""
        return cls(**require_fields(cls, values, "structured output"))


_MAPPINGS = ("json_schema", "structural_tag")
"""Kinds that may be given as mappings."""


@dataclass(frozen=True, slots=True)
class _Tag:
    """JSON text of a schema between two texts; the first starts with the trigger."""

    trigger: str
    begin: str
    schema: str
    end: str


def _tags(value: Mapping[str, Any] | str) -> list[_Tag]:
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
        tags.append(_Tag(trigger, begin, text, end))
    return tags


def _tag_grammar(tags: Sequence[_Tag], added: Collection[str]) -> str:
    """Lark, in llguidance's dialect: text up to a trigger, lazily, the rest of its tag, and so on; then text to the end. `added` has the texts
    that are tokens of their own, which text does not contain.
    """
    names = " | ".join(f"tag_{i}" for i in range(len(tags)))
    lines = [f"start: ({names})* tail", "tail: TEXT", r"TEXT: /(.|\n)*/"]
    for i, tag in enumerate(tags):
        head = f"TEXT {text_part(tag.trigger)}"
        if not tag.trigger.startswith(tuple(added)):
            lines.append(f"head_{i}[lazy]: TEXT {json.dumps(tag.trigger, ensure_ascii=False)}")
            head = f"head_{i}"
        rest, end = text_part(tag.begin.removeprefix(tag.trigger)), text_part(tag.end)
        lines.append(f"tag_{i}: {head} {rest} %json {tag.schema} {end}")
    return "\n".join(lines)


_PART = re.compile(r'@(?P<kind>text|until|free|tags)\((?P<texts>"(?:\\.|[^"\\])*"(?:, "(?:\\.|[^"\\])*")*)\)')
"""Parts of rules that depend on the tokenizer."""


def text_part(text: str) -> str:
    """A part of a grammar's rule: this text as the model's tokenizer has it, by the added tokens in it, which quoted text never matches."""
    return f"@text({json.dumps(text, ensure_ascii=False)})"


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
    return ", ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _resolve_parts(grammar: str, added: Mapping[str, int]) -> str:
    """A grammar with its parts, of `text_part` and the like, written out for a vocabulary with these added tokens."""
    names = "|".join(re.escape(name) for name in sorted(added, key=len, reverse=True))
    token = re.compile(f"({names})") if names else None
    rules: list[str] = []

    def written(text: str) -> str:
        pieces = [piece for piece in (token.split(text) if token else [text]) if piece]
        return " ".join(
            f"<[{added[piece]}]>" if piece in added else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
        )

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
            return f"%lark {{\n{_PART.sub(replaced, _tag_grammar(_tags(text), added))}\n}}"
        if match["kind"] == "free":
            return without(texts)
        if token and token.match(text):  # spelled in characters, it would be read as the same
            return f"{without(texts)} {written(text)}"
        body = without(never)
        rules.append(f"until_{len(rules)}[suffix={json.dumps(text, ensure_ascii=False)}]: {body}")
        return rules[-1].partition("[")[0]

    return "\n".join([_PART.sub(replaced, grammar), *rules])


class Grammar:
    """The state of one output within its grammar. A mask of the vocabulary has `words` int32 words."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self.matcher = matcher
        self.words = words

    def copies(self, count: int) -> list[Grammar]:
        """This one, and others in the same state: for `count` completions of one prompt."""
        others = [Grammar(self.matcher.deep_copy(), self.words) for _ in range(count - 1)]
        return [self, *others]

    def consume(self, tokens: Sequence[int]) -> None:
        """These tokens were sampled."""
        self.matcher.consume_tokens(list(tokens))

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after another. Changes nothing."""
        return 0 if self.failed else int(self.matcher.validate_tokens(list(tokens)))

    @property
    def failed(self) -> bool:
        """Whether it cannot go on: a limit of the parser was reached, or a token came that it had barred."""
        return bool(self.matcher.is_error())

    @property
    def error(self) -> str:
        """Why it cannot go on; empty if it can."""
        return str(self.matcher.get_error())


class HostGrammar(Grammar):
    """The grammar of a host that follows the output by itself.

    Attributes:
        mask: which tokens may come next, as of `next_tokens`: int32 [1 + drafts, words] of the step that is about to be completed; None = all.
    """

    failed, error = False, ""

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def consume(self, tokens: Sequence[int]) -> None:
        """The host knows them."""


class GrammarCompiler:
    """Makes grammars for the tokens of one model.

    Args:
        tokenizer_json: the model's tokenizer.json.
        vocab_size: tokens of its logits.
        eos_ids: the tokens that end an output.

    Raises:
        UsageError: llguidance is missing or cannot read the tokenizer; the model has no end token.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise UsageError(
                "structured output needs llguidance: pip install 'gristmill[structured]', or llguidance"
            ) from error
        if not eos_ids:
            raise UsageError(
                "structured output needs a model with an end token; this one's config.json names none"
            )
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids)
            )
        except Exception as error:  # llguidance raises its own and Rust's
            raise UsageError(f"llguidance cannot read the model's tokenizer: {error}") from error
        added = json.loads(tokenizer_json).get("added_tokens", ())
        self._added = {
            token["content"]: int(token["id"])
            for token in added
            if self._tokenizer.is_special_token(token["id"])
        }
        self._matcher = llguidance.LLMatcher
        self._words = (vocab_size + 31) // 32

    def compile(self, output: StructuredOutput) -> Grammar:
        """The grammar of an output that has not begun; UsageError says what is wrong with it. May take a second."""
        matcher = self._matcher
        try:
            if output.json_schema is not None:
                schema = output.json_schema
                text = matcher.grammar_from_json_schema(schema if isinstance(schema, str) else dict(schema))
            elif output.regex is not None:
                text = matcher.grammar_from_regex(output.regex)
            elif output.grammar is not None:
                text = matcher.grammar_from_lark(_resolve_parts(output.grammar, self._added))
            elif output.structural_tag is not None:
                text = matcher.grammar_from_lark(
                    _resolve_parts(_tag_grammar(_tags(output.structural_tag), self._added), self._added)
                )
            else:
                options = " | ".join(json.dumps(option, ensure_ascii=False) for option in output.choice or ())
                text = matcher.grammar_from_lark(f"start: {options}")
        except ValueError as error:
            raise UsageError(f"the structured output cannot be compiled: {error}") from error
        compiled = matcher(self._tokenizer, text, log_level=0)
        if compiled.is_error():
            raise UsageError(f"the structured output cannot be compiled: {compiled.get_error()}")
        return Grammar(compiled, self._words)


def next_tokens(grammars: Sequence[Grammar], drafts: Sequence[Sequence[int]], pinned: bool) -> Tensor:
    """Which tokens may come next: int32 [rows, words] on the host, bit i of word w for token 32 w + i.

    Grammars do not change. Computed in several threads without the GIL. The rows of a grammar that failed are empty: its request ends with an
    error. So are rows after a draft that is not allowed, which is never accepted.

    Args:
        drafts: for each grammar, tokens that may come; it has a row for the state before them and one after each of them.
    """
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

    rows = [0, *accumulate(1 + len(tokens) for tokens in drafts)]
    mask = torch.zeros(rows[-1], grammars[0].words, dtype=torch.int32, pin_memory=pinned)
    sound = [
        (grammar.matcher, row, list(tokens))
        for grammar, row, tokens in zip(grammars, rows, drafts, strict=False)
        if not grammar.failed
    ]
    # In copies: a limit of the parser that only a wrong draft reaches must not fail the request.
    drafted = [(matcher.deep_copy(), row, tokens) for matcher, row, tokens in sound if tokens]
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(_threads(), drafted, mask.numpy())
    unclear = {row for copy, row, _ in drafted if copy.is_error()}
    plain = [(matcher, row) for matcher, row, tokens in sound if not tokens or row in unclear]
    for row, tokens in zip(rows, drafts, strict=False):
        if row in unclear:
            mask[row : row + 1 + len(tokens)] = 0
    if plain:
        fill_next_token_bitmask_par(_threads(), plain, mask.numpy())
    for matcher, row in plain:
        if matcher.is_error():  # in computing its mask
            mask[row] = 0
    return mask


def given_tokens(
    grammars: Sequence[HostGrammar], rows: Sequence[int], vocab_size: int, pinned: bool
) -> Tensor:
    """As `next_tokens`, with as many rows for each grammar, of what their host has computed."""
    mask = torch.full((sum(rows), (vocab_size + 31) // 32), -1, dtype=torch.int32, pin_memory=pinned)
    for grammar, part in zip(grammars, mask.split(list(rows)), strict=True):
        if grammar.mask is not None:
            part.copy_(grammar.mask)
    return mask


@cache
def _threads() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


def bar(logits: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Set logits [n, vocab] of these rows int64 [m] to -inf where the mask int32 [m, words] has no bit, all on one device."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = ((mask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
