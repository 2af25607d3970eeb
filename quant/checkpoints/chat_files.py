"""What a checkpoint says about conversations: its Jinja templates, and the texts of its special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.quant.checkpoints.files import read_json, read_text
from gristmill.quant.errors import ConfigError

MAX_BYTES = 4 << 20
"""A template is text that people write: larger files are something else."""


@dataclass(frozen=True)
class ChatFiles:
    """Attributes:
    templates: by name; ``default`` is the one that is used where no other is asked for, ``tool_use`` where there are tools.
    tokens: texts of special tokens by the names that templates know them by, such as ``bos_token``.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)


def directory_chat_files(path: Path) -> ChatFiles:
    """Of a Hugging Face directory: chat_template.jinja and additional_chat_templates/, else chat_template.json, else tokenizer_config.json.

    Raises:
        ConfigError: a file that cannot be read, or has another form.
    """
    settings = _object(path / "tokenizer_config.json")
    templates = _templates(settings.get("chat_template"), path / "tokenizer_config.json")
    templates |= _templates(
        _object(path / "chat_template.json").get("chat_template"), path / "chat_template.json"
    )
    if (file := path / "chat_template.jinja").is_file():
        templates["default"] = read_text(file, MAX_BYTES)
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_text(file, MAX_BYTES)
    tokens = {
        **_object(path / "special_tokens_map.json"),
        **{name: value for name, value in settings.items() if name.endswith("_token") and value is not None},
    }
    return ChatFiles(templates, {name: text for name, value in tokens.items() if (text := _token(value))})


def gguf_chat_files(fields: Mapping[str, Any], origin: str) -> ChatFiles:
    """Of a GGUF file's entries ``tokenizer.*``. ConfigError: a template that is no text."""
    templates: dict[str, str] = {}
    for key, value in fields.items():
        head, _, name = key.partition("tokenizer.chat_template")
        if head == "" and key.startswith("tokenizer.chat_template") and (not name or name.startswith(".")):
            if not isinstance(value, str):
                raise ConfigError(f"{origin}: {key} must be text, got {type(value).__name__}")
            templates[name[1:] or "default"] = value
    texts = fields.get("tokenizer.ggml.tokens") or []
    tokens: dict[str, Any] = {}
    for name in ("bos", "eos", "unk", "pad"):
        number = fields.get(f"tokenizer.ggml.{_GGUF.get(name, name)}_token_id")
        if isinstance(number, int) and 0 <= number < len(texts):
            tokens[f"{name}_token"] = texts[number]
    return ChatFiles(templates, tokens)


_GGUF = {"unk": "unknown", "pad": "padding"}


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none."""
    return read_json(file, MAX_BYTES) if file.is_file() else {}


def _templates(value: Any, file: Path) -> dict[str, str]:
    """``chat_template``: a text, or a list of named ones."""
    if value is None:
        return {}
    named = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if not isinstance(named, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
        for one in named
    ):
        raise ConfigError(
            f"{file}: chat_template must be a text, or a list of objects with name and template"
        )
    return {one["name"]: one["template"] for one in named}


def _token(value: Any) -> Any:
    """The text of a special token, which may be an object with ``content``; of several, a list."""
    if isinstance(value, list):
        return [text for one in value if (text := _token(one))]
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
