"""Scales of a quantized KV cache, by the names that the formats give them, to one: (attention module, "k" or "v").

========================================  ==================================================================
``ATTN.k_proj.k_scale``, ``.v_scale``     ModelOpt
``ATTN.k_scale``, ``ATTN.v_scale``        compressed-tensors, Quark
``ATTN.attn.k_scale``, ``.v_scale``       names of vLLM's modules
``ATTN.k_proj.output_scale``              older compressed-tensors and Quark
``ATTN.kv_scale``                         older FP8 files: one scale for both
========================================  ==================================================================

Scales are multipliers: value = code * scale.
"""

from __future__ import annotations

import re

from torch import Tensor

from gristmill.quant.formats.contract import FormatError, Source, one_number

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


def kv_scales(source: Source) -> dict[tuple[str, str], Tensor]:
    """The scales, float32 [1] each."""
    return {key: one_number(source, name) for key, name in kv_scale_names(source).items()}
