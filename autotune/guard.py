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


def refuse_shared(op: Op, arguments: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    """ValueError if an output shares memory with an argument or with another output.

    It may be an argument of its declared shape, element for element. Of tensors with gaps only rows of one stride are compared.
    """
    if len(outputs) > 1 or not _apart(outputs[0], arguments):
        _refuse_shared(op, arguments, outputs)


def _apart(out: torch.Tensor, arguments: Sequence[Any]) -> bool:
    """Whether no argument has an address within `out`, as is usual: said within a microsecond, in every call. False = perhaps."""
    if type(out) is not torch.Tensor or out.is_meta or not out.is_contiguous():
        return False
    begin = out.data_ptr()
    end = begin + out.nbytes
    for given in arguments:
        for tensor in tensors(given):
            at = tensor.data_ptr()
            if at < end and (at + tensor.nbytes > begin or not tensor.is_contiguous()):
                return False
    return True


def _refuse_shared(op: Op, arguments: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    shapes = {a.name: getattr(a, "shape", "") for a in (*op.arguments, *op.returns)}
    seen = [(p.name, t) for p, a in zip(op.parameters, arguments, strict=True) for t in tensors(a)]
    for name, out in zip(op.outputs, outputs, strict=True):
        if type(out) is not torch.Tensor or out.is_meta:  # a fake one has no address
            continue
        for other, tensor in seen:
            if not _share_memory(out, tensor):
                continue
            same = (out.data_ptr(), out.shape, out.stride()) == (
                tensor.data_ptr(),
                tensor.shape,
                tensor.stride(),
            )
            if not (same and shapes[name] == shapes[other] and other not in op.outputs):
                raise ValueError(
                    f"{op.name}: {name} shares memory with {other}, which is read or written too; pass another tensor"
                )
        seen.append((name, out))


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have bytes in common, as far as that is easily told."""
    (a_begin, a_end), (b_begin, b_end) = _span(a), _span(b)
    if a_end <= b_begin or b_end <= a_begin or a.device != b.device:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    if a.dim() != 2 or b.dim() != 2:
        return False
    pitch, column = a.stride(0) * a.itemsize, b_begin - a_begin
    if pitch <= 0 or pitch != b.stride(0) * b.itemsize or a.stride(1) != 1 or b.stride(1) != 1:
        return False
    return column % pitch < a.shape[1] * a.itemsize or column % pitch + b.shape[1] * b.itemsize > pitch


def _span(t: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of `t` and behind its last; an empty span for one without memory."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or not t.numel():
        return 0, 0
    begin = t.data_ptr()
    if t.is_contiguous():
        return begin, begin + t.nbytes
    last = sum(step * (size - 1) for step, size in zip(t.stride(), t.shape, strict=True))
    return begin, begin + (last + 1) * t.itemsize


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
