"""Activations in 8 bits, which a layer hands to the next one: the norm, or silu(gate) · up, is quantized where it is computed.

A linear layer whose kernels multiply codes says which format it takes (`takes`); the layer before it is told so when the model is made
(`RMSNorm.serve`). The bits are those of the layers without codes, which quantize in the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.common import torch_dtype
from gristmill.kernels.given_codes import GROUPS


class Codes(NamedTuple):
    """Quantized rows.

    Attributes:
        x: [tokens, K] of the dtype of activations. Its values are those that were quantized only if the layer before was asked to keep them.
        codes, scales: as `gristmill.kernels.given_codes` has them.
    """

    x: Tensor
    codes: Tensor
    scales: Tensor


def dtype_of(form: str) -> str:
    """The dtype of the codes of a format, as problems name it."""
    return "int8" if form.startswith("int8") else "fp8"


def new_codes(like: Tensor, k: int, form: str) -> tuple[Tensor, Tensor]:
    """Memory for codes [tokens, k] and scales of the rows of `like`. The scales of a group of columns are one after another, and those of
    the next group begin at a multiple of 16 bytes, as Hopper's products read them."""
    rows, group = like.shape[0], GROUPS[form]
    codes = like.new_empty(rows, k, dtype=torch_dtype(dtype_of(form)))
    if not group:
        return codes, like.new_empty(rows, 1, dtype=torch.float32)
    return codes, like.new_empty(cdiv(k, group), cdiv(rows, 4) * 4, dtype=torch.float32).T[:rows]
