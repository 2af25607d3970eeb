"""Channel scales of AWQ, folded into the tensors that produce the channels: the arithmetic, and the statistics that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.quant.awq import search_channel_scales


@dataclass(frozen=True, eq=False)
class Fold:
    """Linears that share an input, and the tensors that produce it.

    Attributes:
        modules: linears to be quantized, by checkpoint name.
        divided: tensors whose rows (or elements) produce the channels: linears, or one vector.
        kept: tensors of float matrices on the same input.
        rows: int64 [C], the rows of `divided`; None = all.
        columns: int64 [K], the channel of each input column; None = the identity.
    """

    modules: tuple[str, ...]
    divided: tuple[str, ...]
    kept: tuple[str, ...] = ()
    rows: Tensor | None = None
    columns: Tensor | None = None


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


def search_and_fold(
    folds: list[Fold], tensors: dict[str, Tensor], moments: Moments, quantize: Callable[[Tensor], QuantTensor]
) -> None:
    """Scale a layer's tensors by the best channel scales of every fold, in place. The output of the layer is unchanged up to float32
    rounding. Moments become those of the scaled inputs. A fold is skipped if none of its linears saw a token.

    Linears and kept matrices become float32; norms and biases keep their dtype, to which scales are adjusted. `quantize` rounds a float32
    matrix as the method will.
    """
    for fold in folds:
        seen = [module for module in fold.modules if module in moments.sums]
        if not seen:
            continue
        device = moments.sums[seen[0]].device
        columns = None if fold.columns is None else fold.columns.to(device)
        pairs = [(tensors[f"{module}.weight"].to(device), moments.sums[module]) for module in seen]
        spread = apply(fold, search_channel_scales(pairs, quantize, columns).cpu(), tensors).to(device)
        outer = spread[:, None] * spread
        scaled = {id(h): h / outer for _, h in pairs}
        moments.sums.update({module: scaled[id(moments.sums[module])] for module in seen})


def apply(fold: Fold, scales: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Multiply the fold's input columns by `scales` float32 [C] and divide their producers, in place.

    Returns float32 [K], the factor of each column: the quotient of a norm or a bias is rounded to its dtype, and the factor is
    chosen so that the product is exact.
    """
    for name in fold.divided:
        vector = tensors[name]
        if vector.dim() == 1:
            divided = (vector.float() / scales).to(vector.dtype)
            exact = vector.float() / divided.float()
            scales = torch.where(torch.isfinite(exact) & (exact > 0), exact, scales)
            tensors[name] = divided
    for name in fold.divided:
        weight = tensors[name].float()
        if weight.dim() == 2:
            rows = torch.arange(len(weight)) if fold.rows is None else fold.rows
            tensors[name] = weight.index_copy(0, rows, weight[rows] / scales[:, None])
    spread = scales if fold.columns is None else scales[fold.columns]
    for name in (*(f"{module}.weight" for module in fold.modules), *fold.kept):
        tensors[name] = tensors[name].float() * spread
    return spread
