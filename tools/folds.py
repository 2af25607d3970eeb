"""Where the layers of a model take the channel scales of AWQ: which tensors produce the inputs of which linears.

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

from collections.abc import Mapping

import torch

from gristmill.quant.checkpoints.table import Weight
from gristmill.quant.errors import UsageError
from gristmill.quant.writing.folds import Fold
from gristmill.runtime.config import ModelConfig


def folds(config: ModelConfig, index: int, weights: tuple[Weight, ...]) -> list[Fold]:
    """The folds of a layer, in order of computation. `weights` are the layer's entries of the model's table.

    Raises:
        UsageError: no rule applies.
    """
    table = {weight.target.removeprefix(f"layers.{index}."): weight for weight in weights}
    if any(weight.stacked for weight in weights):
        raise UsageError(
            f"{config.architecture} has its experts in one tensor: no rule says where to fold their scales (AWQ)"
        )
    if not {"attention_norm", "mlp_norm"} <= table.keys():
        raise UsageError(
            f"{config.architecture} has no norms before attention and feed-forward block: no rule says where to fold scales (AWQ)"
        )
    if config.norm_offset:
        raise UsageError(
            f"{config.architecture} stores the weights of norms less {config.norm_offset}: no rule says how to fold scales into them (AWQ)"
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
