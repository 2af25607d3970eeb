"""Token embedding and logits head; both keep the checkpoint's weights unquantized."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans


class Embedding:
    """Rows of a [vocab, hidden] matrix."""

    def __init__(self, plans: Plans, weight: Tensor) -> None:
        self.weight = weight
        plans.own(weight)

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        return torch.nn.functional.embedding(tokens, self.weight)


class LogitsHead(Linear):
    """Hidden states to logits, with a separate matrix or the embedding's (tied)."""

    def __init__(self, plans: Plans, weight: Tensor) -> None:
        super().__init__(plans, QuantTensor.from_dense(weight))
