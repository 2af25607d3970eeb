"""Memory that detects stray writes: tensors filled with poison, between guard bands that must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.kernel_registry.op import Op

GUARD = 256
"""Elements of guard band before and after every output."""


@dataclass(frozen=True)
class Guarded:
    """A tensor in the middle of a longer poisoned one, for the argument or output `name`."""

    name: str
    tensor: torch.Tensor
    flat: torch.Tensor
    poison: float

    @staticmethod
    def make(name: str, shape: Any, dtype: torch.dtype, device: Any) -> Guarded:
        """Poison is NaN, the smallest integer, or 171 for bytes."""
        size = torch.Size(shape).numel()
        poison = (
            float("nan")
            if dtype.is_floating_point
            else torch.iinfo(dtype).min
            if dtype != torch.uint8
            else 171
        )
        flat = torch.empty(size + 2 * GUARD, dtype=dtype, device=device)
        flat.fill_(poison)
        return Guarded(name, flat[GUARD : GUARD + size].view(shape), flat, poison)

    def renew(self) -> None:
        """Poison everything again."""
        self.flat.fill_(self.poison)

    def intact(self) -> bool:
        """Whether both guard bands are unchanged."""
        bands = torch.cat((self.flat[:GUARD], self.flat[-GUARD:]))
        return bool(
            bands.float().isnan().all() if bands.dtype.is_floating_point else (bands == self.poison).all()
        )


def written(op: Op, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The arguments that `op` writes in place, its workspace apart."""
    return [
        a
        for p, a in zip(op.parameters, arguments, strict=True)
        if p.mutable and isinstance(a, torch.Tensor) and p.name != "workspace"
    ]


def tensors(argument: Any) -> list[torch.Tensor]:
    """The tensors of one argument: itself, or those of a list."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [t for t in argument if isinstance(t, torch.Tensor)] if isinstance(argument, list | tuple) else []


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal; a NaN equals any NaN and nothing else, and zeros of both signs are one."""
    if a.dtype.itemsize == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return False
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
