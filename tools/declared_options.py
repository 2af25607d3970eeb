"""Command-line options made from a declaration: one for each field of `EngineConfig` or `SamplingParams`, with its docstring as help."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams, token_biases
from gristmill.runtime.structured_output import StructuredOutput

NAMES = {(SamplingParams, "bad_words"): "bad_word", (EngineConfig, "seed"): "engine_seed"}
"""Names of options, and of the arguments of their commands, that are not those of their fields."""


class Parsed(click.ParamType[Any]):
    """An option that a function parses; its ValueError is the message."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except (ValueError, TypeError) as error:
            self.fail(f"{value!r} is no {self.name}: {error}", param, ctx)


def number(text: str) -> int | float:
    """An integer, else a float."""
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def ids(text: str) -> list[int]:
    """Token ids: ``1,2,3``."""
    return [int(part) for part in text.split(",")]


def mapping(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("its arrays and objects are nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("a JSON object is expected")
    return value


NUMBER, IDS = Parsed("number", number), Parsed("list of token ids", ids)
BIASES = Parsed("JSON object of token ids and numbers", lambda text: token_biases(mapping(text)))
GRAMMAR = Parsed("structured output", lambda text: StructuredOutput.of(mapping(text)))
KINDS: dict[Any, tuple[dict[str, Any], str]] = {
    Sequence[int]: ({"type": IDS}, "ID,ID,..."),
    Mapping[int, float]: ({"type": BIASES}, "JSON"),
    StructuredOutput: ({"type": GRAMMAR}, "JSON"),
    int | float: ({"type": NUMBER}, "N"),
    int: ({"type": int}, "N"),
    float: ({"type": float}, "X"),
    Sequence[str]: ({"multiple": True}, "TEXT"),
    Sequence[str | Sequence[int]]: ({"multiple": True}, "TEXT"),
}
"""Type of a field, without None -> settings of its option, its metavar. Other types are texts."""


def helps(declared: type) -> dict[str, str]:
    """Field -> its text under ``Args:`` in the docstring of a class, on one line, for a terminal."""
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, arguments = inspect.cleandoc(declared.__doc__ or "").partition("Args:\n")
    for line in arguments.split("\n\n")[0].splitlines():
        if entry := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            for name in names:
                found[name] += " " + line.strip()
    return {name: _for_terminal(text) for name, text in found.items()}


def _for_terminal(text: str) -> str:
    """A docstring's text without what matters in Python only."""
    text = re.sub(r" (Needs|Texts need) [^.]*`LLM`[^.]*\.", "", text)
    text = re.sub(r"[;.] None = ", ". Default: ", text)
    text = text if text[0] == "`" else text[0].upper() + text[1:]
    return text.replace("`", "")


def option_of(declared: type, field: Field[Any], annotation: Any, text: str) -> click.Option:
    """The option of a field. It is None, or (), where it is not given."""
    kinds = tuple(kind for kind in _alternatives(annotation) if kind is not type(None))
    kind = kinds[0] if len(kinds) == 1 else int | float if {*kinds} == {int, float} else str
    name = NAMES.get((declared, field.name), field.name)
    flag = "--" + name.replace("_", "-")
    settings, metavar = KINDS.get(kind, ({}, "TEXT"))
    if kind is bool:
        flag, settings, metavar = f"{flag}/--no-{flag[2:]}", {"is_flag": True}, ""
    elif get_origin(kind) is Literal:
        settings, metavar = {"type": click.Choice(get_args(kind))}, ""
    if settings.get("multiple"):
        text += " May be given several times."
    elif isinstance(field.default, str | int | float):
        text += f" Default: {str(field.default).lower() if kind is bool else field.default}."
    return click.Option([flag, name], help=text, metavar=metavar or None, default=None, **settings)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of another type, itself."""
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def options_of(declared: type) -> list[click.Option]:
    """The options of a class: one for each field."""
    hints, texts = get_type_hints(declared), helps(declared)
    return [option_of(declared, field, hints[field.name], texts[field.name]) for field in fields(declared)]


def given(declared: type, options: MutableMapping[str, Any]) -> dict[str, Any]:
    """The fields of `declared` that were given, removed from the options of a command."""
    values = {f.name: options.pop(NAMES.get((declared, f.name), f.name)) for f in fields(declared)}
    return {name: value for name, value in values.items() if value not in (None, ())}


def params_of(path: str | None, options: Mapping[str, Any]) -> SamplingParams:
    """The parameters that a JSON file and options state, the latter first.

    Raises:
        UsageError: a file that cannot be read, is no JSON object, or has another entry than a parameter.
    """
    stated: dict[str, Any] = {}
    if path is not None:
        try:
            stated = mapping(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {path}: {error}") from error
    return SamplingParams.of({**stated, **options}, path or "SamplingParams")


def config_of(options: MutableMapping[str, Any], **defaults: Any) -> EngineConfig:
    """The options of an engine that were given, removed from those of a command. defaults: of what was not given."""
    return EngineConfig.of({**defaults, **given(EngineConfig, options)})
