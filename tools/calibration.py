"""Calibration tokens passing through a model layer by layer: the hidden states before a layer, and one layer in memory. `make_method`
makes the rounding methods of `gristmill.quant.writing` that need them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats import Format, Tensors
from gristmill.quant.writing.folds import Fold, Moments
from gristmill.quant.writing.methods import Awq, Gptq, Method, RoundToNearest
from gristmill.runtime.batch import make_batch
from gristmill.runtime.devices import parse_device
from gristmill.runtime.errors import UsageError
from gristmill.runtime.hub import local_model
from gristmill.runtime.kv_cache import blocks_needed
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.linear import Linear, PartialSum, SplitLinear
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.plans import BLOCK_SIZE, Plans
from gristmill.runtime.layers.rope import Ropes
from gristmill.runtime.loader.config import load_config, open_checkpoint
from gristmill.runtime.models import make_layer, model_table
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.tools.evaluate import windows_at_once
from gristmill.tools.folds import folds


class LayerStream:
    """A `Calibration`: hidden states of windows before a layer, in float32, and the layers that they pass.

    Layer i is built from given tensors: those of the checkpoint, to observe the inputs of its linears (`moments`), and the written
    ones, to continue (`advance`), so that layer i + 1 gets the same inputs as when the model is served.

    Args:
        tokens: token ids, from the first token of the first window on.
        device: the device that runs and rounds layers.

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
        directory = local_model(directory)
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
        if self.config.layer_attention:
            raise UsageError(
                f"{self.config.architecture} has layers that read the keys and values of others, or have heads of their own, which are not "
                "calibrated"
            )
        self.directory = directory
        self.plans = _Passing(parse_device(device, policy), torch.float32, policy)
        self.ropes = Ropes(self.plans, self.config.for_length(window))
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
        self.device, self.num_layers = self.plans.device, self.config.num_layers
        used = torch.tensor(tokens[: window * windows], dtype=torch.int64)
        self.identity = {
            "calibration": hashlib.sha256(used.numpy().tobytes()).hexdigest()[:16],
            "window": window,
            "windows": windows,
            "device": self.device.type,
        }

    def weights_of(self, index: int) -> tuple[Weight, ...]:
        """The table's entries of a layer."""
        return tuple(weight for weight in self.table.weights if weight.target.startswith(f"layers.{index}."))

    def folds(self, index: int) -> list[Fold]:
        """Where layer `index` takes the channel scales of AWQ; UsageError if no rule applies."""
        return folds(self.config, index, self.weights_of(index))

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
        return make_layer(self.config, weights, self.plans, index, self.ropes[index])

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


def watch(layer: Any, weights: Sequence[Weight], tensors: Mapping[str, Tensor]) -> Moments:
    """Moments that grow with every call of a decoder layer from now on.

    Args:
        weights: the layer's entries of the model's table.
        tensors: the layer's tensors, by checkpoint name.
    """
    table = {weight.target: weight for weight in weights}
    moments = Moments()
    for owner, name, inner in list(find_linears([layer])):
        if isinstance(inner, MixtureOfExperts):
            setattr(owner, name, _Experts(inner, table, moments, tensors))
        else:
            setattr(owner, name, _ObservedLinear(inner, table[inner.target].part_names(), moments))
    return moments


def find_linears(items: list[Any]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, layer) of all linear layers in the table, and of mixtures of experts."""
    for item in items:
        for name, value in list(vars(item).items()):
            if isinstance(value, Linear | SplitLinear):
                if value.target:
                    yield item, name, value
            elif type(value).__module__.startswith("gristmill.runtime.layers.") and hasattr(
                value, "__dict__"
            ):
                yield from find_linears([value])
                if isinstance(value, MixtureOfExperts):
                    yield item, name, value


class _ObservedLinear:
    """A linear layer whose inputs are recorded."""

    def __init__(self, layer: Linear | SplitLinear, modules: list[str], moments: Moments) -> None:
        self.layer, self.modules, self.moments = layer, modules, moments

    def __call__(self, x: Tensor) -> Tensor:
        self.moments.add(self.modules, x)
        return self.layer(x)


class _Experts:
    """A mixture of experts that records the routed inputs and the inputs of the down projections."""

    def __init__(
        self,
        layer: MixtureOfExperts,
        table: Mapping[str, Weight],
        moments: Moments,
        tensors: Mapping[str, Tensor],
    ) -> None:
        self.layer, self.moments, self.tensors = layer, moments, tensors
        self.gate_up = table[f"{layer.target}.gate_up"]
        self.down = table[f"{layer.target}.down"]

    def __call__(self, x: Tensor) -> Tensor | PartialSum:
        ids = self.layer.route(x)[1]
        for expert in ids.unique().tolist():
            rows = x[(ids == expert).any(1)].float()
            names = [source.format(expert=expert) for source in self.gate_up.sources]
            self.moments.add(names, rows)
            gate, up = (rows @ self.tensors[f"{name}.weight"].to(rows).T for name in names)
            self.moments.add(
                [self.down.sources[0].format(expert=expert)], torch.nn.functional.silu(gate) * up
            )
        return self.layer(x)


METHODS = ("rtn", "gptq", "awq")


def make_method(
    name: str,
    directory: str | Path,
    tokens: Sequence[int] | None = None,
    *,
    window: int = 512,
    windows: int = 64,
    device: str = "auto",
    policy: Policy | None = None,
    act_order: bool = True,
) -> Method:
    """A method by its name; UsageError for an unknown one, or one that needs calibration tokens and has none."""
    if name == "rtn" and tokens is None:
        return RoundToNearest()
    if name not in METHODS or (name == "rtn") != (tokens is None):
        raise UsageError(f"method {name!r}: rtn takes no calibration tokens, gptq and awq need them")
    stream = LayerStream(directory, tokens or (), window, windows, device, policy)
    if name == "awq":
        return Awq(stream)
    return Gptq(stream, act_order)
