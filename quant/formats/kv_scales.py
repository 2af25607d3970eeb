"""Scales of a quantized KV cache, by the names that the formats give them, to one: (attention module, "k" or "v").

========================================  ==================================================================
``ATTN.k_proj.k_scale``, ``.v_scale``     ModelOpt
``ATTN.k_scale``, ``ATTN.v_scale``        compressed-tensors, Quark
``ATTN.attn.k_scale``, ``.v_scale``       names of vLLM's modules
``ATTN.k_proj.output_scale``              older compressed-tensors and Quark
``ATTN.kv_scale``                         older FP8 files: one scale for both
========================================  ==================================================================

Scales are multipliers, value = code * scale: one number, or one number per KV head.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from gristmill.quant.formats.contract import FLOATS, FormatError, Source

_PATTERNS = (
    re.compile(r"(?P<attention>.+)\.(?P<which>[kv])_proj\.(?P=which)_scale"),
    re.compile(r"(?P<attention>.+)\.(?P<which>[kv])_proj\.output_scale"),
    re.compile(r"(?P<attention>.+?)(?:\.attn)?\.(?P<which>[kv])_scale"),
    re.compile(r"(?P<attention>.+?)(?:\.attn)?\.(?P<which>kv)_scale"),
)


def kv_scale_names(source: Source) -> dict[tuple[str, str], str]:
    """(attention module, "k" or "v") -> the tensor that holds its scale.

    Raises:
        FormatError: two tensors claim to be the same scale.
    """
    names: dict[tuple[str, str], str] = {}
    for name in source:
        if not name.endswith(("_scale",)):
            continue
        match = next((m for pattern in _PATTERNS if (m := pattern.fullmatch(name))), None)
        if match is None:
            continue
        for which in match["which"]:
            key = (match["attention"], which)
            if key in names:
                raise FormatError(f"tensors {names[key]} and {name} are both the {which} scale of {key[0]}")
            names[key] = name
    return names


def kv_scale(source: Source, name: str, heads: int) -> Tensor:
    """The scale of a tensor, float32 [1] or [heads], whatever dimensions of 1 it is stored with.

    Raises:
        FormatError: neither one number nor one number per head, or not finite and positive.
    """
    shape = source.spec(name)[1]
    value = source.read(name, shape, dtypes=FLOATS).reshape(-1).to(torch.float32).clone()
    if value.numel() not in (1, heads):
        raise FormatError(
            f"tensor {name} must be one number or one per KV head ({heads}), got shape {list(shape)}"
        )
    if not bool(torch.isfinite(value).all() & (value > 0).all()):
        raise FormatError(f"tensor {name} must be finite and positive, got {value.tolist()}")
    return value


def kv_scales(
    source: Source, module: str, names: tuple[str | None, str | None], heads: int, kept: slice
) -> tuple[Tensor, Tensor]:
    """(k_scale, v_scale) of an attention module.

    Args:
        names: the tensors that hold them.
        heads: KV heads of the module.
        kept: those that are taken, of scales per head.

    Returns:
        float32 [1, 1, 1], or both [1, 1, kept heads] if one of them is per head.

    Raises:
        FormatError: one of the two is missing, or they are not valid scales.
    """
    k_name, v_name = names
    if k_name is None or v_name is None:
        raise FormatError(f"{module} has the scale {k_name or v_name} and not that of its other cache")
    scales = [kv_scale(source, name, heads) for name in (k_name, v_name)]
    local = [scale if scale.numel() == 1 else scale[kept] for scale in scales]
    count = max(scale.numel() for scale in local)
    k_scale, v_scale = (scale.expand(count).reshape(1, 1, count).contiguous() for scale in local)
    return k_scale, v_scale
