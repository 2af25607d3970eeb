"""Model directories in the layout of the models' own code: parameters in a JSON file, safetensors under names of their own.

A model family declares how it reads them, a `NativeLayout`; the directory is then a checkpoint with the names and the configuration of Hugging
Face. Values are as they are stored: rows of q and k stay in the order of their own rotation, which the configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gristmill.quant.checkpoints.files import read_json
from gristmill.quant.checkpoints.safetensors import INDEX, SINGLE, Entry, SafetensorsCheckpoint
from gristmill.quant.errors import CheckpointError


@dataclass(frozen=True)
class NativeLayout:
    """How a model family reads such directories.

    Attributes:
        params: the file of parameters, by which such a directory is known.
        weights: the stem of the files of weights: ``STEM.safetensors``, with an index beside several, or without one ``STEM*.safetensors``.
        outer: modules outside layers: the directory's name -> Hugging Face's.
        modules: modules of a layer: the name after ``layers.<layer>.`` -> Hugging Face's after ``model.layers.<layer>.``; in those of experts,
            ``{expert}`` stands for the number.
        tensors: tensors of a module, besides its weight and bias: the directory's name -> that of the format's.
        left_out: beginnings of the names of tensors that are not the text model's.
        config: (parameters, their origin for messages) -> the equivalent of config.json, without dtype. ConfigError for what is not read.
    """

    params: str
    weights: str
    outer: Mapping[str, str]
    modules: Mapping[str, str]
    config: Callable[[Mapping[str, Any], str], Mapping[str, Any]]
    tensors: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


class NativeCheckpoint(SafetensorsCheckpoint):
    """A model directory in a native layout, a `Checkpoint`. `entries` has its tensors by Hugging Face's names.

    Raises, on the first access to tensors:
        CheckpointError: as `SafetensorsCheckpoint`; a tensor whose name the layout does not have.
    """

    def __init__(self, path: str | Path, layout: NativeLayout) -> None:
        super().__init__(path)
        self.layout = layout
        self.index, self.single = f"{layout.weights}.safetensors.index.json", f"{layout.weights}.safetensors"

    @staticmethod
    def is_at(folder: Path, layout: NativeLayout) -> bool:
        """Whether a folder has such a model, and none in Hugging Face's layout."""
        theirs = (folder / "config.json").is_file() and any((folder / n).is_file() for n in (INDEX, SINGLE))
        return (folder / layout.params).is_file() and not theirs

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Hugging Face's name of each tensor -> its own."""
        left_out = self.layout.left_out
        return {self._translated(own): own for own in super().entries if not own.startswith(left_out)}

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Where each tensor is and what it is."""
        stored = super().entries
        return {name: stored[own] for name, own in self._names.items()}

    def config(self) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
        """The equivalent of config.json; there is no generation_config.json."""
        file = self.path / self.layout.params
        dtypes = {"torch.float16": "float16", "torch.bfloat16": "bfloat16"}
        stored = next((str(entry.dtype) for name, entry in self.entries.items() if "embed" in name), "")
        data = {"dtype": dtypes.get(stored, "float32"), **self.layout.config(read_json(file), str(file))}
        return data, {}, str(file)

    def _stored_name(self, name: str) -> str:
        return self._names[name]

    def _index(self) -> dict[str, str]:
        shards = sorted(self.path.glob(f"{self.layout.weights}*.safetensors"))
        if not (self.path / self.index).is_file() and len(shards) > 1:
            # No index says what each shard has: all tensors of all of them.
            return {f"/{shard.name}": shard.name for shard in shards}
        return super()._index()

    def _translated(self, own: str) -> str:
        module, _, suffix = own.rpartition(".")
        suffix, layer = self.layout.tensors.get(suffix, suffix), module.split(".")
        if module in self.layout.outer:
            return f"{self.layout.outer[module]}.{suffix}"
        if len(layer) > 2 and layer[0] == "layers" and layer[1].isdigit():
            expert = next((part for part in layer[2:] if part.isdigit()), "")
            name = self.layout.modules.get(
                ".".join("{expert}" if part.isdigit() else part for part in layer[2:])
            )
            if name is not None:
                return f"model.layers.{layer[1]}.{name.format(expert=expert)}.{suffix}"
        raise CheckpointError(f"{self.path}: tensor {own} is not read in the layout of {self.layout.params}")
