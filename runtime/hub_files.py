"""Which files of a repository are the model: decided from their names alone, before anything is fetched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from gristmill.quant.checkpoints.colbert import METADATA
from gristmill.quant.checkpoints.safetensors import INDEX, SINGLE
from gristmill.quant.errors import ConfigError
from gristmill.quant.formats import checkpoint_formats
from gristmill.runtime.models import native_layouts

BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    # The modules after the encoder of a sentence-transformers model.
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]*_*/config.json",
    "[0-9]*_*/model.safetensors",
    METADATA,
)
"""What is read next to the weights of a directory, as patterns. Code and pickles are not among them, so they are never fetched."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
LISTED = 40
"""The most GGUF files that an error lists."""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model in its repository. `gguf` is the one that is the model; None = the directory is."""

    names: tuple[str, ...]
    gguf: str | None = None


def model_files(
    repo: str, wanted: str, sizes: Mapping[str, int | None], shards: Callable[[], Iterable[str]]
) -> ModelFiles:
    """The files that a model needs.

    Args:
        repo: the repository's name, for messages.
        wanted: what the user named in it: a GGUF file, a pattern, a quantization; "" = nothing.
        sizes: the repository's files, with their bytes where known.
        shards: reads the index of the weights; called only where there is one that counts.

    Raises:
        ConfigError: no such file, several that could be meant, or no weights that are read.
    """
    names = [name for name in sizes if _plain(name)]
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if wanted:
        return _gguf(repo, _matching(repo, wanted, names, ggufs, sizes))
    models = [name for name in ggufs if not PurePosixPath(name).name.lower().startswith("mmproj")]
    patterns = (*BESIDE, *(form.sidecar for form in checkpoint_formats().values() if form.sidecar))
    beside = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if INDEX in sizes:
        return ModelFiles((*beside, INDEX, *sorted(set(shards()))))
    if SINGLE in sizes:
        return ModelFiles((*beside, SINGLE))
    for layout in native_layouts():
        weights = [name for name in names if fnmatchcase(name, f"{layout.weights}*.safetensors*")]
        if layout.params in sizes and weights:
            return ModelFiles((*beside, layout.params, *weights))
    if len(models) == 1:
        return _gguf(repo, models[0])
    if models:
        raise ConfigError(
            f"{repo} has several GGUF files: name one, as {repo}:{models[0]}, or its quantization. They are:{_listed(models, sizes)}"
        )
    pickled = sum(name.lower().endswith(PICKLED) for name in names)
    hint = f"; its {pickled} pickled files are never fetched, since reading them runs code" if pickled else ""
    raise ConfigError(f"{repo} has neither {SINGLE} nor {INDEX} nor GGUF files{hint}")


def _plain(name: str) -> bool:
    """Whether a name stays in the folder that it is put in."""
    return bool(name) and not name.startswith("/") and "\\" not in name and ".." not in name.split("/")


def _gguf(repo: str, name: str) -> ModelFiles:
    if part := re.search(r"-(\d{5})-of-(\d{5})\.gguf$", name):
        raise ConfigError(
            f"{repo}:{name} is one of {int(part[2])} parts of a model; only whole GGUF files are read: merge them by llama.cpp's "
            "llama-gguf-split --merge, or take a repository of safetensors"
        )
    return ModelFiles((name,), name)


def _matching(
    repo: str, wanted: str, names: list[str], ggufs: list[str], sizes: Mapping[str, int | None]
) -> str:
    """The one GGUF file of a name, a pattern, or a quantization's name."""
    if wanted in ggufs:
        return wanted
    if wanted in names:
        raise ConfigError(
            f"{repo}:{wanted} is no GGUF file; without a file, {repo} is the directory with its safetensors"
        )
    if any(sign in wanted for sign in "*?["):
        found = [name for name in ggufs if fnmatchcase(name, wanted)]
    else:
        # Q4_K is not Q4_K_M, nor is Q4_XS IQ4_XS.
        part = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?:[-./]|$)", re.IGNORECASE)
        found = [name for name in ggufs if part.search(name)]
    if len(found) == 1:
        return found[0]
    if not ggufs:
        raise ConfigError(f"{repo} has no GGUF files, so none is {wanted!r}")
    if not found:
        raise ConfigError(f"{repo} has no GGUF file {wanted!r}. It has:{_listed(ggufs, sizes)}")
    raise ConfigError(f"{repo}:{wanted} could be any of:{_listed(found, sizes)}")


def _listed(names: list[str], sizes: Mapping[str, int | None]) -> str:
    """Files with their sizes, for an error of one line."""
    shown = [
        f"{name} ({size / 1e9:.2f} GB)" if (size := sizes[name]) else name for name in sorted(names)[:LISTED]
    ]
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return " " + ", ".join(shown) + more
