"""Second moments of the inputs of a decoder layer's linear layers, accumulated while tokens pass through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.runtime.layers.linear import Linear, SplitLinear, Summand
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.loader.weights import Weight


class Moments:
    """By the checkpoint's module names: `sums`, H = Σ x xᵀ float32 [K, K], one tensor for modules that share an input; and
    `tokens`, the number of x."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens: dict[str, int] = {}

    def add(self, modules: Sequence[str], x: Tensor) -> None:
        """Add rows x [tokens, K] as inputs of all the modules."""
        if not x.shape[0]:
            return
        inputs = x.reshape(-1, x.shape[-1]).float()
        total, product = self.sums.get(modules[0]), inputs.T @ inputs
        total = product if total is None else total.add_(product)
        self.sums.update(dict.fromkeys(modules, total))
        self.tokens.update(dict.fromkeys(modules, self.tokens.get(modules[0], 0) + inputs.shape[0]))


def watch(layer: Any, weights: Sequence[Weight], tensors: Mapping[str, Tensor]) -> Moments:
    """Moments that grow with every call of a decoder layer from now on.

    weights: of the layer, from the model's table. tensors: those of the layer, by checkpoint name.
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

    def __call__(self, x: Tensor) -> Tensor | Summand:
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
