"""Opening a checkpoint by path."""

from __future__ import annotations

from pathlib import Path

from gristmill.runtime.loader.checkpoint import Checkpoint
from gristmill.runtime.loader.gguf import GgufCheckpoint
from gristmill.runtime.loader.safetensors import SafetensorsCheckpoint


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """The model at a path: a GGUF file, or a Hugging Face directory, whose files are read on first use. An open one is returned.

    Raises:
        CheckpointError: a damaged GGUF file.
    """
    if not isinstance(path, str | Path):
        return path
    place = Path(path)
    if place.suffix == ".gguf" and not place.is_dir():
        return GgufCheckpoint(place)
    return SafetensorsCheckpoint(place)
