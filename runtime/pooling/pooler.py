"""From the hidden states of sequences to vectors: pooling, in float32, then linear layers; truncation and normalization come last, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layers.encoder import ACTIVATIONS
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.pool import pool
from gristmill.runtime.models import Encoder
from gristmill.runtime.pooling.modules import Dense, Pooling
from gristmill.runtime.sequences import Sequences


class Head(Protocol):
    """What follows the hidden states. `columns` are those of its result; by_token: it has a row for each token, not for each sequence."""

    columns: int
    by_token: bool

    def __call__(self, hidden: Tensor, batch: Sequences, skip: Sequence[int]) -> Tensor:
        """hidden [tokens, hidden] -> float32 [sequences, columns], or [tokens, columns].

        `skip` counts each sequence's first tokens, those of its prompt.
        """
        ...


class EmbeddingHead:
    """Pooling, and linear layers over its result, all in float32."""

    by_token = False

    def __init__(self, plans: Plans, hidden: int, pooling: Pooling, dense: Sequence[Dense]) -> None:
        self.pooling = pooling
        self.layers, self.columns = dense_layers(plans, dense, hidden * len(pooling.modes))

    def __call__(self, hidden: Tensor, batch: Sequences, skip: Sequence[int]) -> Tensor:
        """As of `Head`."""
        x = pool(hidden, batch, self.pooling.modes, None if self.pooling.include_prompt else skip)
        for layer in self.layers:
            x = layer(x)
        return x


class TokenHead:
    """Linear layers over the hidden state of every token, in float32 (ColBERT)."""

    by_token = True

    def __init__(self, plans: Plans, hidden: int, dense: Sequence[Dense]) -> None:
        self.layers, self.columns = dense_layers(plans, dense, hidden)

    def __call__(self, hidden: Tensor, batch: Sequences, skip: Sequence[int]) -> Tensor:
        """As of `Head`."""
        x = hidden.float()
        for layer in self.layers:
            x = layer(x)
        return x


def dense_layers(plans: Plans, dense: Sequence[Dense], columns: int) -> tuple[list[DenseLayer], int]:
    """The layers over `columns`, and the columns of their result."""
    layers = []
    for each in dense:
        layers.append(DenseLayer(plans, each, columns))
        columns = each.outputs
    return layers, columns


class DenseLayer:
    """A `Dense` module: f(x · Wᵀ + b) in float32."""

    def __init__(self, plans: Plans, dense: Dense, columns: int) -> None:
        if dense.inputs != columns:
            raise ConfigError(
                f"{dense.folder} takes {dense.inputs} columns, and what it follows has {columns}"
            )
        checkpoint = SafetensorsCheckpoint(dense.folder)

        def read(name: str, *shape: int) -> Tensor:
            tensor = checkpoint.read(f"linear.{name}", shape)
            return tensor.to(torch.float32, copy=True).to(plans.device)

        weight = QuantTensor.from_dense(read("weight", dense.outputs, dense.inputs))
        bias = read("bias", dense.outputs) if dense.bias else None
        self.linear = Linear(plans, weight, bias, dtype=torch.float32, target=str(dense.folder))
        self.activation = ACTIVATIONS.get(dense.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [sequences, inputs] -> float32 [sequences, outputs]."""
        y = self.linear(x)
        return y if self.activation is None else self.activation(y)


class ClassifierHead:
    """The logits of the model's classifier."""

    by_token = False

    def __init__(self, model: Encoder) -> None:
        self.model, self.columns = model, model.config.labels

    def __call__(self, hidden: Tensor, batch: Sequences, skip: Sequence[int]) -> Tensor:
        """As of `Head`."""
        return self.model.classify(hidden, batch).float()


class AnswerHead:
    """The logit of one answer over another, after the last token: sigmoid of it is their softmax.

    Args:
        row: that of the answer in the logits head, less that of the other, [hidden].
    """

    columns = 1
    by_token = False

    def __init__(self, plans: Plans, row: Tensor) -> None:
        self.row = row.float().to(plans.device)
        plans.own(self.row)

    def __call__(self, hidden: Tensor, batch: Sequences, skip: Sequence[int]) -> Tensor:
        """As of `Head`."""
        return (hidden[batch.last].float() @ self.row)[:, None]
