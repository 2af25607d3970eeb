"""A sentence-transformers directory (Reimers and Gurevych, 2019, arXiv:1908.10084): what follows the model, as modules.json lists it.

Each entry has a type, of which the last component counts, as packages have moved, and a folder with a config.json: the model (Transformer),
how its hidden states become one vector (Pooling), linear layers over that (Dense), and its normalization (Normalize). Next to modules.json,
config_sentence_transformers.json has prompts, and sentence_bert_config.json the longest text.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.quant.checkpoints.files import read_json
from gristmill.runtime.config import Fields
from gristmill.runtime.errors import ConfigError

FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""Flags of Pooling, in the order in which the vectors of several are joined."""
NAMES = {"mean_sqrt_len_tokens": "mean_sqrt_len", "weightedmean": "weighted_mean", "lasttoken": "last"}
"""Names in ``pooling_mode`` of newer files, where they differ from those here."""
MODES = tuple(FLAGS.values())
ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""Classes of torch.nn that a Dense may name, and their names here."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan", "MaxSim")


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a sequence become one vector.

    Attributes:
        modes: of `MODES`; the vectors of several are joined.
        include_prompt: whether the tokens of a prompt are among those that are pooled.
    """

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True


@dataclass(frozen=True)
class Dense:
    """A linear layer over the pooled vector: ``linear.weight`` in the folder's model.safetensors; `activation` is one of `ACTIVATIONS`."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class LateInteraction:
    """How texts become a vector for each token (Khattab and Zaharia, 2020, arXiv:2004.12832), as PyLate writes it.

    Attributes:
        query_prefix, document_prefix: tokens after the first one; "" = none.
        query_length, document_length: tokens of the longest text.
        expand: whether queries are filled up to query_length with the mask token.
        attend: whether tokens attend to these.
        skipped: tokens of documents that have no vector.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32
    document_length: int = 180
    expand: bool = True
    attend: bool = False
    skipped: tuple[str, ...] = tuple(string.punctuation)


@dataclass(frozen=True)
class Modules:
    """What follows a model.

    Attributes:
        pooling: None = there is none.
        late: how there is a vector for each token; None = there is one for a text.
        dense: the linear layers, in order.
        normalize: whether the result has length 1.
        model: the folder of the model, relative to the directory; "" = the directory.
        max_length: tokens of the longest text; None = as the model says.
        lowercase: whether texts are lowercased before they are tokenized.
        prompts: texts that are put before others, by name; default_prompt: the name of the one that is put before all others.
        similarity: of two embeddings, one of `SIMILARITIES`.
    """

    pooling: Pooling | None = field(default_factory=Pooling)
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    model: str = ""
    max_length: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    late: LateInteraction | None = None

    def columns(self, hidden: int) -> int:
        """Elements of the result, of a model with `hidden` elements per token."""
        if self.dense:
            return self.dense[-1].outputs
        return hidden * (1 if self.pooling is None else len(self.pooling.modes))


def read_modules(folder: Path) -> Modules | None:
    """The modules of a directory; None if it has no modules.json.

    Raises:
        ConfigError: a file that cannot be read, modules of another kind or in another order.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return None
    model, pooling, dense, normalize = "", None, list[Dense](), False
    for index, entry in enumerate(_entries(file)):
        kind, place = str(entry.get("type")).rpartition(".")[2], str(entry.get("path") or "")
        if (kind == "Transformer") != (index == 0) or normalize or (kind == "Pooling" and index != 1):
            raise ConfigError(
                f"{file}: expected a Transformer, then Pooling, Dense layers and Normalize, got {kind!r} as module {index}"
            )
        if kind == "Transformer":
            model = place
        elif kind == "Pooling":
            pooling = _pooling(folder / place / "config.json")
        elif kind == "Dense":
            dense.append(_dense(folder / place))
        elif kind == "Normalize":
            normalize = True
        else:
            raise ConfigError(
                f"{file}: modules of type {kind!r} are not supported; known: Transformer, Pooling, Dense, Normalize"
            )
    length, lowercase = _text_limits(folder / model)
    beside = folder / "config_sentence_transformers.json"
    prompts, default, similarity = _prompts(beside)
    late = _late(beside) if pooling is None and dense else None
    return Modules(
        pooling, tuple(dense), normalize, model, length, lowercase, prompts, default, similarity, late
    )


def _entries(file: Path) -> list[dict[str, Any]]:
    """The entries of modules.json, by their index."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{file} must hold a list of modules, got {entries!r}")
    return sorted(entries, key=lambda entry: int(entry.get("idx", 0)))


def _pooling(file: Path) -> Pooling:
    fields = Fields(read_json(file), str(file))
    given = fields.data.get("pooling_mode")
    if given is None:
        modes = tuple(mode for flag, mode in FLAGS.items() if fields.flag(flag, False))
    else:
        names = [given] if isinstance(given, str) else given
        chosen = {NAMES.get(str(name), str(name)) for name in names}
        if not chosen <= {*MODES}:
            raise ConfigError(f"{file}: pooling_mode must be of {', '.join(MODES)}, got {given!r}")
        modes = tuple(mode for mode in MODES if mode in chosen)
    if not modes:
        raise ConfigError(f"{file}: no mode of pooling is set")
    return Pooling(modes, fields.flag("include_prompt", True))


def _dense(folder: Path) -> Dense:
    file = folder / "config.json"
    fields = Fields(read_json(file), str(file))
    name = fields.get("activation_function", str, None) or "Identity"
    if fields.flag("use_residual", False):
        raise ConfigError(f"{file}: use_residual, a layer around others, is not supported")
    activation = ACTIVATIONS.get(name.rpartition(".")[2].removesuffix("()"))
    if activation is None:
        raise ConfigError(f"{file}: activation_function must be of {', '.join(ACTIVATIONS)}, got {name!r}")
    return Dense(
        folder, fields.size("in_features"), fields.size("out_features"), fields.flag("bias", True), activation
    )


def _text_limits(folder: Path) -> tuple[int | None, bool]:
    """``max_seq_length`` and ``do_lower_case`` of sentence_bert_config.json."""
    file = folder / "sentence_bert_config.json"
    if not file.is_file():
        return None, False
    fields = Fields(read_json(file), str(file))
    return fields.size("max_seq_length", None), fields.flag("do_lower_case", False)


def _prompts(file: Path) -> tuple[Mapping[str, str], str | None, str]:
    """``prompts``, ``default_prompt_name`` and ``similarity_fn_name``."""
    if not file.is_file():
        return {}, None, "cosine"
    fields = Fields(read_json(file), str(file))
    prompts = fields.get("prompts", dict, None) or {}
    default = fields.get("default_prompt_name", str, None)
    similarity = fields.get("similarity_fn_name", str, None) or "cosine"
    if not all(isinstance(text, str) for text in prompts.values()) or (
        default is not None and default not in prompts
    ):
        raise ConfigError(
            f"{file}: prompts must be texts by name, default_prompt_name one of them, got {prompts!r} and {default!r}"
        )
    if similarity not in SIMILARITIES:
        raise ConfigError(
            f"{file}: similarity_fn_name must be of {', '.join(SIMILARITIES)}, got {similarity!r}"
        )
    return prompts, default, similarity


def _late(file: Path) -> LateInteraction:
    """What PyLate adds to config_sentence_transformers.json; its defaults for what is not there."""
    fields, usual = Fields(read_json(file) if file.is_file() else {}, str(file)), LateInteraction()
    skipped = fields.get("skiplist_words", list, None)
    return LateInteraction(
        fields.get("query_prefix", str, usual.query_prefix),
        fields.get("document_prefix", str, usual.document_prefix),
        fields.size("query_length", usual.query_length),
        fields.size("document_length", usual.document_length),
        fields.flag("do_query_expansion", usual.expand),
        fields.flag("attend_to_expansion_tokens", usual.attend),
        usual.skipped if skipped is None else tuple(map(str, skipped)),
    )
