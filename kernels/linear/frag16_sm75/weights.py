"""How weights lie in the tiles that the kernels for sm_75 are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format

if TYPE_CHECKING:
    import torch


def stored(name: str, second: torch.Tensor) -> Format:
    """The format of a configuration, or that of products (K-quants) where the weight's `second` tensor says that its scales are float32."""
    import torch

    plain = next(form for form in FORMATS if form.name == name)
    if second.dtype != torch.float32:
        return plain
    return next((form for form in FORMATS if form.factored and form.schemes == plain.schemes), plain)
