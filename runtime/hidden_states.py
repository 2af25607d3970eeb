"""Hidden states that a step leaves on the device, for proposers that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.models import Model


@runtime_checkable
class TappedModel(Protocol):
    """A model whose layers' outputs can be read."""

    taps: bool

    def forward(
        self, batch: Batch, cache: PagedCache, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """As `Model.forward`. `taps` maps layers to their outputs with the residual, [tokens, hidden], which are written for the layers in it."""
        ...


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The states of a step's tokens on the device: `values` [rows, width], and in `firsts` the row of each entry's first token."""

    values: Tensor
    firsts: list[int]


class KeptStates:
    """Which states of a model's steps are kept: those after the last norm, or the outputs of `layers`, side by side. `width` is their size.

    Raises:
        UsageError: the model does not hand over the outputs of its layers.
    """

    def __init__(self, model: Model, layers: tuple[int, ...] = ()) -> None:
        self.model, self.layers = model, layers
        self.width = model.config.hidden_size * max(1, len(layers))
        if layers and not isinstance(model, TappedModel):
            raise UsageError(f"{model.config.architecture} does not hand over the outputs of its layers")

    def forward(self, batch: Batch, cache: PagedCache) -> tuple[Tensor, Tensor]:
        """A step: the states after the last norm, and those that are kept."""
        if not self.layers:
            hidden = self.model.forward(batch, cache)
            return hidden, hidden
        taps: dict[int, Tensor | None] = dict.fromkeys(self.layers)
        hidden = cast(TappedModel, self.model).forward(batch, cache, taps)
        return hidden, torch.cat([states for states in taps.values() if states is not None], -1)
