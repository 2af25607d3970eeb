"""A linear layer of a host's model: weights as they are read, joined where one matrix holds them, packed, multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill import ops
from gristmill.autotune.operators import writer
from gristmill.integrations.collect import Collected
from gristmill.integrations.layouts import choose_layout
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import NoKernelError
from gristmill.kernels.linear.weight import LinearWeight, problem_of
from gristmill.quant import QuantTensor, Tensors, concat
from gristmill.quant.formats.contract import Format, FormatError, owned

LINEAR = writer(default_registry().op("linear"), "x", "weight", "bias", "n")

Reader = Callable[[Tensors, str, tuple[int, ...]], tuple[QuantTensor, Tensor | None]]
"""The tensors of a module, its name and its shape -> its weight, and what its input is multiplied by, float32 [K], or None."""


def stored_scheme(checkpoint: Format, modules: Iterable[str]) -> str | None:
    """The scheme of modules that a layer joins: "" if all are stored in floats, None if they differ or only their tensors say."""
    try:
        schemes = {checkpoint.scheme_of(module) for module in modules}
    except FormatError:
        return None
    if len(schemes) != 1:
        return None
    return str(schemes.pop() or "")


@dataclass(frozen=True)
class Part:
    """One module of a fused layer.

    Attributes:
        module: its name in the checkpoint.
        shard: the host's id of it.
        rows: rows of the whole module.
        start, count: the rows of this rank.
    """

    module: str
    shard: Any
    rows: int
    start: int
    count: int


@dataclass(frozen=True)
class Shard:
    """A tensor-parallel rank's part of a layer.

    Attributes:
        prefix: the layer's name.
        parts: its modules, in the order of their rows.
        shape: [n, k] of this rank.
        whole_k: k of all ranks.
        rank: which part of k it is, if k is divided.
    """

    prefix: str
    parts: Sequence[Part]
    shape: tuple[int, int]
    whole_k: int
    rank: int

    def read(
        self, collected: Collected, read: Reader, device: torch.device
    ) -> list[tuple[QuantTensor, Tensor | None]]:
        """The weight of each part on the device, and what its input is multiplied by. ValueError: the checkpoint lacks one."""
        return [self._part(part, collected, read, device) for part in self.parts]

    def _part(
        self, part: Part, collected: Collected, read: Reader, device: torch.device
    ) -> tuple[QuantTensor, Tensor | None]:
        stored = collected.parts.get(part.shard)
        module, rows, start = part.module, part.rows, part.start
        if stored is None and None in collected.parts:  # the checkpoint stores the fused matrix
            stored, module = collected.parts[None], self.prefix
            before = [other.rows for other in self.parts[: self.parts.index(part)]]
            rows, start = sum(other.rows for other in self.parts), sum(before) + part.start
        if stored is None:
            raise ValueError(f"{self.prefix}: the checkpoint has no tensors of {part.module}")
        source = Tensors({f"{module}.{suffix}": tensor for suffix, tensor in stored.items()})
        weight, pre_scale = read(source, module, (rows, self.whole_k))
        weight = weight.to(device)
        if part.count != rows:
            weight = weight.narrow(0, start, part.count)
        k = self.shape[1]
        if k != self.whole_k:
            first = self.rank * k
            weight = weight.narrow(1, first, k)
            pre_scale = None if pre_scale is None else pre_scale[first : first + k]
        return weight, pre_scale


class Product:
    """One packed weight and its plans, without and with a bias."""

    def __init__(
        self, weight: QuantTensor, pre_scale: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        act_order, self.n = weight.g_idx is not None, weight.n
        self.pre_scale = None if pre_scale is None else pre_scale.to(device, dtype)
        problems = [
            problem_of(weight.scheme, weight.n, weight.k, dtype, bias, act_order=act_order)
            for bias in (False, True)
        ]
        layout = choose_layout("linear", problems[0], device)
        packed = LinearWeight.pack(owned(weight.to(device)), [layout])
        self.tensors = packed.tensors()
        self.plans = [ops.bind("linear", problem, device, layouts=packed.layouts) for problem in problems]
        self.handles = [plan.handle for plan in self.plans]
        self.scheme = str(weight.scheme)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self.pre_scale is not None:
            x = x * self.pre_scale
        out = x.new_empty(x.shape[0], self.n)
        handle = self.handles[int(bias is not None)]  # Dynamo of torch 2.11 takes no bool as an index
        LINEAR(x, self.tensors, bias, self.n, handle, out)
        return out

    def prepare(self, sizes: Sequence[int], *, bias: bool) -> None:
        """Resolve, verify and load the kernels for these numbers of tokens; with `bias`, also those of calls with a bias."""
        for plan in self.plans[: 1 + bias]:
            plan.prepare(sizes)

    def without_bias(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return self(x, None)

    def kernels(self) -> str:
        """The kernels of small and large batches."""
        names = dict.fromkeys(self.plans[0].entry(size).kernel for size in (1, 16, 256))
        return ", ".join(names)


def multiply(products: Sequence[Product], x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times the rows of all products, one after the other -> [..., N]."""
    flat = x.reshape(-1, x.shape[-1])
    if len(products) == 1:
        out = products[0](flat, bias)
    else:
        biases = [None] * len(products) if bias is None else bias.split([p.n for p in products])
        out = torch.cat([p(flat, b) for p, b in zip(products, biases, strict=True)], -1)
    return out.view(*x.shape[:-1], out.shape[-1])


def joined(read: Sequence[tuple[QuantTensor, Tensor | None]]) -> list[tuple[QuantTensor, Tensor | None]]:
    """Neighbours of one scheme and without a scaled input as one matrix."""
    weights: list[tuple[QuantTensor, Tensor | None]] = []
    for weight, pre_scale in read:
        if weights and pre_scale is None and weights[-1][1] is None and _joins(weights[-1][0], weight):
            weights[-1] = (concat([weights[-1][0], weight], 0), None)
        else:
            weights.append((weight, pre_scale))
    return weights


def _joins(first: QuantTensor, second: QuantTensor) -> bool:
    """Whether two weights are rows of one matrix."""
    try:
        concat([first.narrow(0, 0, 1), second.narrow(0, 0, 1)], 0)
    except ValueError:
        return False
    return True


def unserved(scheme: str | None, n: int, k: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel multiplies a weight [n, k] of this scheme; None if one does, or if the scheme is not known yet."""
    if scheme is None:
        return None
    try:
        choose_layout("linear", problem_of(scheme, n, k, dtype), device)
    except (NoKernelError, ValueError) as error:
        return f"no verified kernel: {error}"
    return None
