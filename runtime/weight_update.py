"""New weights for a loaded model, written into the memory of the old ones.

The new model is built next to the old one, through the same loader, and compared with it part by part. Only then are its tensors
copied. Packed layouts, bound plans and captured CUDA graphs are those of before, and an update that is refused changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.checkpoints.checkpoint import NamedSource
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats import FormatError, open_format
from gristmill.quant.formats.contract import Tensors
from gristmill.runtime.errors import CheckpointError
from gristmill.runtime.layers.loaded_schemes import LoadedSchemes
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.models import Model, build_model, model_table

WeightSource = str | Path | Mapping[str, Tensor]
"""A Hugging Face directory, a GGUF file, or the tensors of a checkpoint by name."""


class _InMemory(Tensors):
    path = Path("tensors in memory")


def build_like(
    model: Model, source: WeightSource, quant: QuantScheme | None, staging: torch.device | None
) -> Model:
    """A model of the same configuration and plans with the weights of `source`, on `staging` (None: the model's device).

    A mapping holds the tensors of an unquantized checkpoint, or of one quantized like the model's own. `quant` is as in `load_model`.

    Raises:
        CheckpointError: an invalid checkpoint, or one whose configuration differs.
    """
    checkpoint: NamedSource
    if isinstance(source, Mapping):
        checkpoint, quantization = _InMemory(source), model.config.quantization
    else:
        opened = open_checkpoint(source)
        checkpoint = opened
        config = parse_config(*opened.config()).for_length(model.config.max_position)
        quantization = config.quantization
        differing = [
            name
            for name, value in vars(model.config).items()
            if name not in ("quantization", "dtype") and value != getattr(config, name)
        ]
        if differing:
            raise CheckpointError(
                f"{checkpoint.path}: config.json differs from that of the loaded model in {', '.join(differing)}"
            )
    stored = None if quantization is None else open_format(quantization)
    plans = copy(model.plans)
    plans.owned, plans.bound, plans.layers = [], dict(plans.bound), Counter()
    plans.schemes = LoadedSchemes(
        plans.schemes.room
    )  # the same memory, so that each layer is loaded as before
    device = plans.device if staging is None else staging
    weights = Weights(checkpoint, model_table(model.config), plans.dtype, device, quant, stored)
    try:
        return build_model(model.config, weights, plans)
    except FormatError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def copy_weights(model: Model, new: Model) -> None:
    """Write every tensor of `new` into that of `model`, and wait for the device.

    Raises:
        CheckpointError: the models differ in a plan or a shape; nothing is changed.
        RuntimeError: the device failed during the copy; the message says how far it came.
    """
    pairs = {id(old): (name, old, tensor) for name, old, tensor in _pairs(model, new, "model", set())}
    done = 0
    try:
        with torch.inference_mode():
            for _, old, tensor in pairs.values():
                old.copy_(tensor)
                done += 1
        if model.plans.device.type == "cuda":
            # A kernel may read its packed weights before the one before it has ended.
            torch.cuda.synchronize(model.plans.device)
    except RuntimeError as error:
        name = [*pairs.values()][min(done, len(pairs) - 1)][0]
        raise RuntimeError(
            f"the weights were updated up to {name}, {done} of {len(pairs)} tensors, and then the device failed: load the model again"
        ) from error


def model_tensors(model: Model) -> list[Tensor]:
    """The tensors of a model: parameters, tables and what was derived from them, each once."""
    return [*{id(tensor): tensor for _, tensor, _ in _pairs(model, model, "model", set())}.values()]


def _pairs(old: Any, new: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, old tensor, new tensor) of two objects of the same structure; CheckpointError where they differ."""
    if isinstance(old, Tensor):
        if not isinstance(new, Tensor) or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise _different(name, _shown(old), _shown(new))
        yield name, old, new
        return
    if isinstance(old, Plans | Resolver) or id(old) in seen:
        return
    if type(old) is not type(new):
        raise _different(name, _shown(old), _shown(new))
    if isinstance(old, list | tuple):
        parts = {f"[{i}]": part for i, part in enumerate(old)}
        others = {f"[{i}]": part for i, part in enumerate(new)}
    elif isinstance(old, Mapping):
        parts, others = ({f"[{key!r}]": part for key, part in both.items()} for both in (old, new))
    elif hasattr(old, "__dict__") and not isinstance(old, type | FunctionType | BoundPlan):
        parts, others = ({f".{key}": part for key, part in vars(both).items()} for both in (old, new))
    else:
        if old is not new and (isinstance(old, BoundPlan) or old != new):
            raise _different(name, _shown(old), _shown(new))
        return
    seen.add(id(old))
    if parts.keys() != others.keys():
        raise _different(name, f"{len(parts)} parts", f"{len(others)}")
    for key, part in parts.items():
        yield from _pairs(part, others[key], name + key, seen)


def _different(name: str, old: str, new: str) -> CheckpointError:
    return CheckpointError(
        f"the weights are not updated, because {name} would change: {old}, and in the update {new}"
    )


def _shown(part: Any) -> str:
    if isinstance(part, Tensor):
        return f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
    return str(part.static if isinstance(part, BoundPlan) else part)[:80]
