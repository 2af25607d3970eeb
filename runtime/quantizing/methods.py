"""The rounding methods for the linear weights of a layer: round to nearest, GPTQ, AWQ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.quant import QuantTensor
from gristmill.quant.formats import Format, Writer
from gristmill.quant.gptq import Factor, gptq, search_scales
from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.loader.weights import Weight
from gristmill.runtime.quantizing.folds import folds, search_and_fold
from gristmill.runtime.quantizing.moments import Moments
from gristmill.runtime.quantizing.stream import LayerStream


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


@dataclass
class Calibrated:
    """The base of calibrated methods: windows of tokens pass through the layers as they are written.

    tokens: from the first token of the first window on. device: for running and rounding layers.

    Raises:
        UsageError: those of `LayerStream`.
    """

    directory: str | Path
    tokens: Sequence[int]
    window: int = 512
    windows: int = 64
    device: str = "auto"
    policy: Policy | None = None
    notes: list[str] = field(default_factory=list)
    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.stream = LayerStream(
            self.directory, self.tokens, self.window, self.windows, self.device, self.policy
        )
        used = self.tokens[: self.window * self.windows]
        digest = hashlib.sha256(torch.tensor(used, dtype=torch.int64).numpy().tobytes()).hexdigest()
        self.identity: dict[str, Any] = {
            "method": self.name,
            "calibration": digest[:16],
            "window": self.window,
            "windows": self.windows,
            "device": self.stream.plans.device.type,
        }

    def advance(self, index: int, tensors: Mapping[str, Tensor], stored: Format) -> None:
        """Pass the windows through the layer as it will be served."""
        if index + 1 < self.stream.config.num_layers:
            self.stream.advance(index, tensors, stored)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.stream.plans.device)


@dataclass
class Gptq(Calibrated):
    """GPTQ on searched scales. A linear that saw fewer tokens than it has inputs (a rarely chosen expert) is rounded to
    nearest, with a note: its Hessian does not have full rank, and GPTQ would overfit those few tokens.

    act_order: process the columns of largest energy first.
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
        moments = self.stream.moments(index, tensors)
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
        for index in range(self.stream.config.num_layers):
            folds(self.stream.config, index, self.stream.weights_of(index))  # refuses before any work

    def round(
        self, index: int, weights: Sequence[Weight], tensors: Mapping[str, Tensor], target: Writer
    ) -> Rounded:
        moments, scaled = self.stream.moments(index, tensors), dict(tensors)
        layer_folds = folds(self.stream.config, index, tuple(weights))
        search_and_fold(layer_folds, scaled, moments, target.quantize)
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


METHODS = ("rtn", "gptq", "awq")


def make_method(
    name: str,
    directory: str | Path,
    tokens: Sequence[int] | None = None,
    *,
    window: int = 512,
    windows: int = 64,
    device: str = "auto",
    policy: Policy | None = None,
    act_order: bool = True,
) -> Method:
    """A method by its name; UsageError for an unknown one, or one that needs calibration tokens and has none."""
    if name == "rtn" and tokens is None:
        return RoundToNearest()
    if name not in METHODS or (name == "rtn") != (tokens is None):
        raise UsageError(f"method {name!r}: rtn takes no calibration tokens, gptq and awq need them")
    if name == "awq":
        return Awq(directory, tokens or (), window, windows, device, policy)
    return Gptq(directory, tokens or (), window, windows, device, policy, act_order=act_order)
