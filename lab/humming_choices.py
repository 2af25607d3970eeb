"""humming in several configurations of its own heuristics: its choice for the given M, and for other M whose choice may be faster."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch


def humming_choices(weights: list[list[torch.Tensor]], x: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    """Name -> call, by index of a copy of the weight. Copies have the five tensors of humming_v1; x [M, K] and out [M, N] are in bf16."""
    from humming.ops import humming_gemm

    from gristmill.kernels.linear.humming import LOCKS

    layer = weights[0][4].numpy().tobytes().decode()
    locks = torch.zeros(LOCKS.bytes // 4, dtype=torch.int32, device=x.device)

    def call(tuning: str, index: int) -> None:
        tensors = [t if t.numel() else None for t in weights[index % len(weights)][:4]]
        humming_gemm(
            layer_config=layer,
            inputs=x,
            weight=tensors[0],
            weight_scale=tensors[1],
            zero_point=tensors[2],
            weight_scale_2=tensors[3],
            outputs=out,
            locks=locks,
            tuning_config=tuning,
        )

    return {name: partial(call, tuning) for name, tuning in _tunings(layer, x.shape[0]).items()}


def _tunings(layer_config: str, m: int) -> dict[str, str]:
    from humming.tune import get_heuristics_config

    layer = json.loads(layer_config)
    layer.pop("sublayer_name", None)
    tunings: dict[str, str] = {}
    other_m = (1, 16, 32, 64) if m <= 16 else (32, 64) if m <= 64 else ()
    for rows in dict.fromkeys((m, *other_m)):
        try:
            text = json.dumps(get_heuristics_config(layer, shape_m=rows, device=0), default=str)
        except (AssertionError, ValueError):  # raised for shapes without a configuration
            continue
        if text not in tunings.values():
            tunings[f"humming m={rows}"] = text
    return tunings
