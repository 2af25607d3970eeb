"""Calibration tokens passing through a model layer by layer: the hidden states before a layer, and one layer in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.formats import Format, Tensors
from gristmill.runtime.batch import make_batch
from gristmill.runtime.devices import parse_device
from gristmill.runtime.errors import UsageError
from gristmill.runtime.evaluate import windows_at_once
from gristmill.runtime.kv_cache import blocks_needed
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.plans import BLOCK_SIZE, Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.loader.open import open_checkpoint
from gristmill.runtime.loader.weights import Weight, Weights, WeightTable
from gristmill.runtime.models import make_layer, model_table
from gristmill.runtime.quantizing.moments import Moments, watch
from gristmill.runtime.scheduler import ScheduledRequest


class LayerStream:
    """Hidden states of windows before a layer, in float32, and the layers that they pass.

    Layer i is built from given tensors: those of the checkpoint, to observe the inputs of its linears (`moments`), and the written
    ones, to continue (`advance`), so that layer i + 1 gets the same inputs as when the model is served.

    Raises:
        UsageError: too few tokens, a token that is not in the vocabulary, a window longer than the model's positions, a model
            whose experts are in one tensor (gpt-oss), or no such device.
    """

    def __init__(
        self,
        directory: str | Path,
        tokens: Sequence[int],
        window: int = 512,
        windows: int = 64,
        device: str = "auto",
        policy: Policy | None = None,
    ) -> None:
        self.config = load_config(directory)
        self.table = model_table(self.config)
        if window < 2 or windows < 1 or len(tokens) < window * windows:
            raise UsageError(
                f"calibration needs {windows} windows of {window} tokens, got {len(tokens)} tokens"
            )
        if window > self.config.max_position:
            raise UsageError(
                f"a calibration window of {window} tokens is longer than the model's {self.config.max_position}"
            )
        if max(tokens[: window * windows]) >= self.config.vocab_size:
            raise UsageError(
                f"token ids must be below the vocabulary's size {self.config.vocab_size}: these tokens are of another model"
            )
        if any(weight.stacked for weight in self.table.weights):
            raise UsageError(
                f"{self.config.architecture} has its experts in one tensor, which is not calibrated"
            )
        self.directory = Path(directory)
        self.plans = _Passing(parse_device(device, policy), torch.float32, policy)
        self.rope = Rope(self.plans, self.config)
        at_once, each = (
            windows_at_once(self.plans.device, window, windows, windows),
            blocks_needed(window, BLOCK_SIZE),
        )
        # Layers do not depend on token ids, and each window is computed as a whole: one batch and one cache serve all steps.
        entries = [
            ScheduledRequest(
                f"window {i}", 0, window, False, [0] * window, list(range(i * each, (i + 1) * each)), []
            )
            for i in range(at_once)
        ]
        self.batch = make_batch(entries, BLOCK_SIZE, self.plans.device, all_rows=True)
        one = replace(self.config, num_layers=1)
        self.cache = PagedCache(one, at_once * each, BLOCK_SIZE, torch.float32, self.plans.device).layers[0]
        self.states = self._embedded(tokens, at_once * window, windows // at_once)

    def weights_of(self, index: int) -> tuple[Weight, ...]:
        """The table's entries of a layer."""
        return tuple(weight for weight in self.table.weights if weight.target.startswith(f"layers.{index}."))

    @torch.inference_mode()
    def moments(self, index: int, tensors: Mapping[str, Tensor]) -> Moments:
        """The moments of the inputs of layer `index`, built from float `tensors`; the windows do not advance."""
        layer = self._layer(index, tensors, None)
        moments = watch(layer, self.weights_of(index), tensors)
        for x, residual in self.states:
            layer(x.clone(), residual.clone(), self.batch, self.cache)
        return moments

    @torch.inference_mode()
    def advance(self, index: int, tensors: Mapping[str, Tensor], stored: Format | None = None) -> None:
        """Pass the windows through layer `index`, built from `tensors` in the format `stored` (None: floats)."""
        layer = self._layer(index, tensors, stored)
        self.states = [(layer(x, residual, self.batch, self.cache), residual) for x, residual in self.states]

    def _layer(self, index: int, tensors: Mapping[str, Tensor], stored: Format | None) -> Any:
        source = _TensorSource(tensors, self.directory)
        dense = None if stored is None else QuantScheme.parse("fp32")
        weights = Weights(
            source,
            WeightTable(self.weights_of(index)),
            torch.float32,
            self.plans.device,
            dense,
            stored,
        )
        return make_layer(self.config, weights, self.plans, index, self.rope)

    def _embedded(self, tokens: Sequence[int], length: int, steps: int) -> list[tuple[Tensor, Tensor]]:
        (entry,) = (weight for weight in self.table.weights if weight.target == "embedding")
        matrix = open_checkpoint(self.directory).read(entry.sources[0], (entry.rows[0], entry.columns or 0))
        hidden_states = []
        for i in range(steps):
            ids = torch.tensor(tokens[i * length : (i + 1) * length])
            x = matrix[ids].to(device=self.plans.device, dtype=torch.float32)
            hidden_states.append((x, torch.zeros_like(x)))
        return hidden_states


class _Passing(Plans):
    """Plans of temporary layers, which do not keep their weights."""

    def own(self, *tensors: Tensor | None) -> None:
        """Nothing is counted."""


class _TensorSource(Tensors):
    """Tensors in memory instead of a directory."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        super().__init__(tensors)
        self.path = path
