"""Rules for folding a scale of input channels into the preceding tensors, for AWQ, and their arithmetic.

    what is scaled                      what is divided
    ==================================  =========================================================
    q, k, v (MLA: down to the latents)  the norm before attention
    MLA: q and kv up from the latents   the norms of the latents
    attention's output                  rows of v, one for all queries of its head (MLA: of kv's values)
    gate, up, router, shared experts    the norm before the feed-forward block
    down, of each expert its own        rows of up: silu(gate) · up is linear in up

gpt-oss fits none of the last two (its activation adds 1 to up, its experts are one tensor) and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.quant.awq import search_channel_scales
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.loader.weights import Weight
from gristmill.runtime.quantizing.moments import Moments


@dataclass(frozen=True, eq=False)
class Fold:
    """Linears that share an input, and the tensors that produce it.

    modules: linears to be quantized, by checkpoint name. kept: tensors of float matrices on the same input. divided: tensors
    whose rows (or elements) produce the channels: linears, or one vector. rows: int64 [C], the rows, None = all. columns: int64
    [K], the channel of each input column, None = the identity.
    """

    modules: tuple[str, ...]
    divided: tuple[str, ...]
    kept: tuple[str, ...] = ()
    rows: Tensor | None = None
    columns: Tensor | None = None


def folds(config: ModelConfig, index: int, weights: tuple[Weight, ...]) -> list[Fold]:
    """The folds of a layer, in order of computation; UsageError if no rule applies.

    weights: the layer's entries of the model's table.
    """
    table = {weight.target.removeprefix(f"layers.{index}."): weight for weight in weights}
    if any(weight.stacked for weight in weights):
        raise UsageError(
            f"{config.architecture} has its experts in one tensor: no rule says where to fold their scales (AWQ)"
        )
    parts = {"qkv": 3, "gate_up": 2, "experts.gate_up": 2, "shared.gate_up": 2}
    for name, count in parts.items():
        if name in table and len(table[name].sources) != count:
            raise UsageError(
                f"{config.architecture} stores {name} in {len(table[name].sources)} tensors, not in {count}: no rule says where to "
                "fold their scales (AWQ)"
            )
    folds_of_layer = _mla(config, table) if "latents" in table else _attention(config, table)
    names = [n for n in ("gate_up", "experts.gate_up", "shared.gate_up") if n in table]
    shared = tuple(module for n in names for module in table[n].part_names())
    router = table["router"].sources if "router" in table else ()
    folds_of_layer.append(Fold(shared, table["mlp_norm"].sources, router))
    for name in names:
        down = table[name.replace("gate_up", "down")].part_names()
        count = len(table[name].sources)
        ups = table[name].part_names()[count - 1 :: count]
        bias = table.get(f"{name}.bias")
        for module, up in zip(down, ups, strict=True):
            folds_of_layer.append(Fold((module,), (f"{up}.weight", *(bias.sources[-1:] if bias else ()))))
    return folds_of_layer


def _attention(c: ModelConfig, table: Mapping[str, Weight]) -> list[Fold]:
    qkv, bias = table["qkv"], table.get("qkv.bias")
    repeats = c.num_heads // c.num_kv_heads
    channels = torch.arange(c.num_kv_heads * c.head_dim).view(c.num_kv_heads, 1, c.head_dim)
    columns = channels.expand(-1, repeats, -1).reshape(-1)
    values = (f"{qkv.sources[2]}.weight", *(bias.sources[2:] if bias else ()))
    return [
        Fold(qkv.sources, table["attention_norm"].sources),
        Fold(table["out"].sources, values, columns=columns),
    ]


def _mla(c: ModelConfig, table: Mapping[str, Weight]) -> list[Fold]:
    mla = c.mla
    if mla is None:
        raise UsageError(f"{c.architecture} has latents and no sizes of them")
    first, ranked = table["latents"].sources, "q_norm" in table
    folds = [Fold(first if ranked else (*table["q"].sources, *first), table["attention_norm"].sources)]
    if ranked:
        folds.append(Fold(table["q"].sources, table["q_norm"].sources))
    folds.append(Fold(table["kv"].sources, table["kv_norm"].sources))
    rows = (
        torch.arange(c.num_heads * (mla.nope_dim + mla.v_dim))
        .view(c.num_heads, -1)[:, mla.nope_dim :]
        .reshape(-1)
    )
    folds.append(Fold(table["out"].sources, (f"{table['kv'].sources[0]}.weight",), rows=rows))
    return folds


def search_and_fold(
    folds: list[Fold], tensors: dict[str, Tensor], moments: Moments, quantize: Callable[[Tensor], QuantTensor]
) -> None:
    """Scale a layer's tensors by the best channel scales of every fold, in place. The output of the layer is unchanged up to float32
    rounding. Moments become those of the scaled inputs. A fold is skipped if none of its linears saw a token.

    Linears and kept matrices become float32; norms and biases keep their dtype, to which scales are adjusted.
    quantize: rounds a float32 matrix as the method will.
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
