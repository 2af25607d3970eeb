"""The interface of a model on disk: a configuration, a tokenizer, tensors by name. `open_checkpoint` returns one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from gristmill.quant.checkpoints.chat_files import ChatFiles
from gristmill.quant.checkpoints.files import lfs_hint
from gristmill.quant.errors import ConfigError
from gristmill.quant.formats import Source

FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of unquantized weights in checkpoints."""


class NamedSource(Source, Protocol):
    """Tensors by name; `path` is their origin in messages."""

    @property
    def path(self) -> Path: ...


class Checkpoint(NamedSource, Protocol):
    """A model on disk. Tensors are read one at a time, after all headers have been checked.

    Methods of `Source` raise CheckpointError with the file and the tensor.
    """

    def config(self) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
        """The contents of config.json and generation_config.json, and the name of the first for messages.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        ...

    def tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer`.

        Raises:
            NoTokenizerError: there is none. ConfigError: it cannot be read.
        """
        ...

    def chat_files(self) -> ChatFiles:
        """Templates of conversations, and texts of special tokens; empty if there are none.

        Raises:
            ConfigError: they cannot be read.
        """
        ...


class NoTokenizerError(ConfigError):
    """The model has no readable tokenizer; prompts must be lists of token ids."""


def read_tokenizer(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json; ConfigError if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for a file it cannot read
        raise ConfigError(f"cannot read {path}: {error}{lfs_hint(path)}") from error
