"""The six tensors of a weight in plain_v1 whose codes have block scales, as products with activations in such formats take them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.common import need

if TYPE_CHECKING:
    from torch import Tensor


def need_blocks(
    name: str, scheme: QuantScheme, weight: Sequence[Tensor], rows: tuple[int, ...], k: int
) -> None:
    """Checks codes [*rows, bytes of K], scales [*rows, groups of K], and the multipliers of rows that only formats with a factor have.

    Raises:
        ValueError: tensors of other shapes, or in another order than x's columns. `name` is who says so.
    """
    codes, scales, _, row_scale, _, perm = weight
    shapes = ((*rows, scheme.code_bytes(k)), (*rows, scheme.groups(k)))
    need(
        (tuple(codes.shape), tuple(scales.shape)) == shapes and not perm.numel(),
        f"{name}: expected codes {list(shapes[0])} and scales {list(shapes[1])} in the order of x's columns, "
        f"got {list(codes.shape)} and {list(scales.shape)}" + (" and a permutation" if perm.numel() else ""),
    )
    factors = prod(rows) if scheme.has_global else 0
    need(
        row_scale.numel() == factors,
        f"{name}: expected {factors} multipliers of rows, got {row_scale.numel()}",
    )
