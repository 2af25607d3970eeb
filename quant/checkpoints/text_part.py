"""The text model within the checkpoint of a model that also sees or hears: its configuration is under ``text_config``, its tensors under
``language_model``. The other parts are left out, as if the directory were the text model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gristmill.quant.checkpoints.safetensors import Entry, SafetensorsCheckpoint

PREFIXES = ("language_model.model.", "model.language_model.", "language_model.")
"""Modules of the text model, whose names continue as those after ``model.`` do; of the last, as they are (``lm_head``)."""


@dataclass(frozen=True)
class TextPart:
    """How a family reads such models.

    Attributes:
        architecture: that of the text model.
        defaults: entries that files leave out of ``text_config``.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


class TextPartCheckpoint(SafetensorsCheckpoint):
    """The text model in a directory, a `Checkpoint`."""

    def __init__(self, path: str | Path, part: TextPart) -> None:
        super().__init__(path)
        self.part = part

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """The text model's name of each of its tensors -> the one in the files."""
        names = {}
        for own in super().entries:
            prefix = next((prefix for prefix in PREFIXES if own.startswith(prefix)), None)
            if prefix is not None:
                names[("" if prefix == PREFIXES[-1] else "model.") + own.removeprefix(prefix)] = own
            elif own.startswith("lm_head."):
                names[own] = own
        return names

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Where each tensor of the text model is and what it is."""
        stored = super().entries
        return {name: stored[own] for name, own in self._names.items()}

    def config(self) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
        """As of a directory with the text model alone."""
        data, generation, origin = super().config()
        inner = data.get("text_config") or {}
        shared = {
            name: value
            for name, value in data.items()
            if not isinstance(value, Mapping) or name == "quantization_config"
        }
        given = {name: value for name, value in inner.items() if value is not None}
        whole = {**self.part.defaults, **shared, **given, "architectures": [self.part.architecture]}
        # The two levels differ in files, and with the classes' own values.
        if "lm_head.weight" not in self:
            whole["tie_word_embeddings"] = True
        return whole, generation, f"{origin}: text_config"

    def _stored_name(self, name: str) -> str:
        return self._names[name]
