"""The scheme that a weight is loaded in on an accelerator: the stored one, if a kernel there multiplies it as it is stored.

A weight that every kernel would dequantize in each call is dequantized once, when it is loaded, as long as memory lasts: to the dtype of the
activations, to which those kernels round it too. A format of activations that no kernel multiplies with the weight is left out first.
On a CPU weights are loaded as they are stored.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from gristmill.autotune.dequantizing import is_served
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor

GIB = 1 << 30


def in_scheme(weight: QuantTensor, scheme: QuantScheme) -> QuantTensor:
    """A weight as `LoadedSchemes` has chosen: dense in this scheme, or as it is, with the activation format of the scheme."""
    if weight.scheme.is_dense or weight.scheme == scheme:
        return weight
    if scheme.is_dense:
        return QuantTensor.from_dense(weight.dequantize(scheme.name))
    return replace(weight, scheme=replace(weight.scheme, activation=scheme.activation))


class LoadedSchemes:
    """The schemes in which the weights of one model are loaded. All together, the weights may grow by `room` bytes."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.grown = 0
        self.changed: Counter[tuple[str, str]] = Counter()
        self._served: dict[Problem, bool] = {}

    def choose(self, problem: Problem, growth: int, resolver: Resolver) -> QuantScheme:
        """The scheme to load the weight of a layer in; a float scheme is the dtype of x.

        Args:
            problem: the static problem, with the scheme of the weight.
            growth: bytes by which the weight is larger in floats.
        """
        scheme, x = QuantScheme.parse(problem.text("w")), problem.text("x")
        if scheme.is_dense or self.keeps_stored(resolver):
            return scheme
        for kept in dict.fromkeys((scheme, scheme.without_activation)):
            if self._is_served(problem.with_values(w=kept.name), resolver):
                return self._changed(scheme, kept)
        if self.grown + growth > self.room:
            return scheme
        self.grown += growth
        return self._changed(scheme, QuantScheme.parse(x))

    @staticmethod
    def keeps_stored(resolver: Resolver) -> bool:
        """Whether a device loads every weight as it is stored: a CPU."""
        return resolver.target.vendor == "cpu"

    def line(self, device: str) -> str:
        """A line about weights that were loaded in another scheme than they are stored in; "" if there are none."""
        kinds = [
            f"{count} layers of {stored} as {loaded}" for (stored, loaded), count in self.changed.items()
        ]
        memory = f", in {self.grown / GIB:.2f} GiB more" if self.grown > 0 else ""
        return (
            f"loaded {', '.join(kinds)}{memory}: no kernel of {device} multiplies them as stored"
            if kinds
            else ""
        )

    def _changed(self, stored: QuantScheme, loaded: QuantScheme) -> QuantScheme:
        if stored != loaded:
            self.changed[stored.name, loaded.name] += 1
        return loaded

    def _is_served(self, problem: Problem, resolver: Resolver) -> bool:
        if problem not in self._served:
            select = partial(resolver.select, resolver.registry.op(problem.op))
            self._served[problem] = is_served(select, problem, resolver.policy)
        return self._served[problem]
