"""The rounding methods for the linear weights of a layer: round to nearest, GPTQ, AWQ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gristmill.quant import QuantTensor
from gristmill.quant.checkpoints.table import Weight
from gristmill.quant.errors import CheckpointError, UsageError
from gristmill.quant.formats import Format, Writer
from gristmill.quant.gptq import Factor, gptq, search_scales
from gristmill.quant.writing.folds import Fold, Moments, search_and_fold


@dataclass(frozen=True)
class Rounded:
    """A layer's rounded linears by module, on the CPU, and other tensors that changed, by name."""

    weights: Mapping[str, QuantTensor]
    changed: Mapping[str, Tensor]


class Method(Protocol):
    """A rounding method. `identity`: the options that results depend on. `notes`: weights that were treated differently, and why."""

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def notes(self) -> list[str]: ...

    def round(
        self, index: int, weights: Sequence[Weight], tensors: Mapping[str, Tensor], target: Writer
    ) -> Rounded:
        """The linears of layer `index`; layers come in order, each followed by `advance`."""
        ...

    def advance(self, index: int, tensors: Mapping[str, Tensor], stored: Format) -> None:
        """Layer `index` has been written with these tensors in this format."""
        ...


class RoundToNearest:
    """Round every weight independently."""

    def __init__(self) -> None:
        self.identity: Mapping[str, Any] = {"method": "rtn"}
        self.notes: list[str] = []

    def round(
        self, index: int, weights: Sequence[Weight], tensors: Mapping[str, Tensor], target: Writer
    ) -> Rounded:
        if not target.stacked:
            return Rounded(
                {
                    module: nearest(target, f"{module}.weight", tensors[f"{module}.weight"])
                    for module in linears(weights)
                },
                {},
            )
        stacks = [name for weight in weights if weight.stacked for name in weight.part_names()]
        return Rounded({name: nearest(target, name, tensors[name].transpose(1, 2)) for name in stacks}, {})

    def advance(self, index: int, tensors: Mapping[str, Tensor], stored: Format) -> None:
        """Layers are independent."""


class Calibration(Protocol):
    """Calibration tokens that pass through a model, layer after layer. `identity`: what results depend on, as of a `Method`."""

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def num_layers(self) -> int: ...

    def moments(self, index: int, tensors: Mapping[str, Tensor]) -> Moments:
        """The moments of the inputs of layer `index`, built from float `tensors` by checkpoint name."""
        ...

    def folds(self, index: int) -> list[Fold]:
        """Where layer `index` takes channel scales, in order of computation; UsageError if nothing is known of such a layer."""
        ...

    def advance(self, index: int, tensors: Mapping[str, Tensor], stored: Format) -> None:
        """Pass the tokens through layer `index`, built from `tensors` in the format `stored`."""
        ...


@dataclass
class Calibrated:
    """The base of methods that need calibration."""

    calibration: Calibration
    notes: list[str] = field(default_factory=list, init=False)
    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.identity: dict[str, Any] = {"method": self.name, **self.calibration.identity}

    def advance(self, index: int, tensors: Mapping[str, Tensor], stored: Format) -> None:
        """Pass the windows through the layer as it will be served."""
        if index + 1 < self.calibration.num_layers:
            self.calibration.advance(index, tensors, stored)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.calibration.device)


@dataclass
class Gptq(Calibrated):
    """GPTQ on searched scales. A linear that saw fewer tokens than it has inputs (a rarely chosen expert) is rounded to
    nearest, with a note: its Hessian does not have full rank, and GPTQ would overfit those few tokens.

    Attributes:
        act_order: whether columns of the largest energy are processed first.
    """

    act_order: bool = True
    damping: float = 0.01
    name: ClassVar[str] = "gptq"
    _last: tuple[Tensor, Factor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.identity |= {"act-order": self.act_order, "damping": self.damping}

    def round(
        self, index: int, weights: Sequence[Weight], tensors: Mapping[str, Tensor], target: Writer
    ) -> Rounded:
        moments = self.calibration.moments(index, tensors)
        return Rounded(
            {m: self._one(m, tensors[f"{m}.weight"], moments, target) for m in linears(weights)}, {}
        )

    def _one(self, module: str, stored: Tensor, moments: Moments, target: Writer) -> QuantTensor:
        weight = self._placed(stored).float()
        start = nearest(target, f"{module}.weight", weight)
        if start.scheme.minimums:
            raise UsageError(
                f"GPTQ does not round {start.scheme}: schemes with minimums are rounded to nearest or by AWQ"
            )
        token_count, needed = moments.tokens.get(module, 0), weight.shape[1]
        if token_count < needed:
            self.notes.append(
                f"{module}: rounded to nearest: {token_count} calibration tokens reached it, GPTQ needs {needed}"
            )
            return start.to("cpu")
        hessian = moments.sums[module]
        if start.scheme.bits < 8:  # with 8 bits, clipping loses more than finer steps gain
            start = search_scales(weight, hessian, start)
        return gptq(weight, self._factor(hessian), start).to("cpu")

    def _factor(self, hessian: Tensor) -> Factor:
        """The factor of the last Hessian, cached because q, k and v share one."""
        if self._last is None or self._last[0] is not hessian:
            self._last = (hessian, Factor.of(hessian, self.act_order, self.damping))
        return self._last[1]


@dataclass
class Awq(Calibrated):
    """AWQ: channel scales are folded into the preceding tensors; weights are rounded to nearest, on scales clipped where that helps."""

    name: ClassVar[str] = "awq"

    def __post_init__(self) -> None:
        super().__post_init__()
        for index in range(self.calibration.num_layers):
            self.calibration.folds(index)  # refuses before any work

    def round(
        self, index: int, weights: Sequence[Weight], tensors: Mapping[str, Tensor], target: Writer
    ) -> Rounded:
        moments, scaled = self.calibration.moments(index, tensors), dict(tensors)
        search_and_fold(self.calibration.folds(index), scaled, moments, target.quantize)
        made = {}
        for module in linears(weights):
            weight = self._placed(scaled.pop(f"{module}.weight")).float()
            start, hessian = nearest(target, f"{module}.weight", weight), moments.sums.get(module)
            if hessian is None:
                self.notes.append(f"{module}: rounded to nearest: no calibration token reached it")
            made[module] = (start if hessian is None else search_scales(weight, hessian, start)).to("cpu")
        return Rounded(made, {name: tensor for name, tensor in scaled.items() if tensor is not tensors[name]})


def linears(weights: Sequence[Weight]) -> list[str]:
    """The modules that are quantized, in the table's order."""
    return [name for weight in weights if weight.kind == "linear" for name in weight.part_names()]


def nearest(target: Writer, name: str, weight: Tensor) -> QuantTensor:
    """A weight rounded to nearest; CheckpointError if the format cannot represent it."""
    try:
        return target.quantize(weight)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
