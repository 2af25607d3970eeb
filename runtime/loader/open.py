"""Opening a checkpoint by path."""

from __future__ import annotations

from pathlib import Path

from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.quant.checkpoints.gguf import GgufCheckpoint
from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.models import families


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """The model at a path: a GGUF file, or a Hugging Face directory, whose files are read on first use. An open one is returned.

    Raises:
        CheckpointError: a damaged GGUF file.
    """
    if not isinstance(path, str | Path):
        return path
    place = Path(path)
    if place.suffix == ".gguf" and not place.is_dir():
        return GgufCheckpoint(place, gguf_architectures())
    return SafetensorsCheckpoint(place)


def gguf_architectures() -> tuple[GgufArchitecture, ...]:
    """The GGUF architectures that model families declare."""
    by_family = {family.name: family.gguf for family in families().values()}
    return tuple(architecture for declared in by_family.values() for architecture in declared)
