"""Structured output: an output that a JSON schema, a regular expression, a grammar, a list of choices or tags in text describe. `grammars` has what
follows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.runtime.declared_names import require_fields
from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammar_parts import parse_tags


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
            parse_tags(value)
        elif name == "json_schema":
            _require_json(value)

    @property
    def own_grammar(self) -> bool:
        """Whether it may describe more than an answer, such as calls of tools: a grammar or tags."""
        return self.grammar is not None or self.structural_tag is not None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StructuredOutput:
        """From a mapping with one of its fields. UsageError: it has another."""
        return cls(**require_fields(cls, values, "structured output"))


def _require_json(schema: Mapping[str, Any] | str) -> None:
    """UsageError: it is no JSON. What stands in a grammar must be one value, or it would be read as rules."""
    try:
        if isinstance(schema, str):
            json.loads(schema)
        else:
            json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"json_schema is not JSON: {error}") from error


_MAPPINGS = ("json_schema", "structural_tag")
"""Kinds that may be given as mappings."""
