"""Measured times that apply to a problem: exact ones, scaled near ones, and those of a sibling device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from statistics import median

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import AxisValue, Problem
from gristmill.kernel_registry.store import NEAR_LIMIT, Store, Timing, config_key, distance, target_key
from gristmill.kernel_registry.target import Target

PLAIN: dict[str, AxisValue] = {"codes": False, "epilogue": "none"}
"""Axes beside a product, and their values without anything beside it: whether x was quantized before the call, and what follows. The product is
the same, so configurations that were measured without them serve a problem that has no times of its own."""


LAUNCH_US = 1.5
"""Microseconds of a launch on a GPU, which no size changes. Without them the times of small problems shrink and grow too much. Of dense products
on an H200 whose shape was left out, selection lost 0.7 %, 27 % at worst, and loses 0.3 and 14 % (1 to 4 us select alike)."""


@dataclass(frozen=True)
class _Near:
    """A measured time and the distance of its problem from the requested one.

    Attributes:
        same: the static problem is the same, but for `plain`.
        sibling: taken on another device.
        plain: axes of `PLAIN` that the problem has and this one has not.
    """

    timing: Timing
    at: Problem
    far: float
    same: bool
    sibling: bool
    plain: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Taken here, of this very problem."""
        return self.far == 0 and not self.sibling and not self.plain

    @property
    def rank(self) -> tuple[bool, int, tuple[str, ...], float, float]:
        """Smaller is better: what was taken here, of this problem, near, fast."""
        return self.sibling, len(self.plain), self.plain, self.far, self.timing.us


class Times:
    """The records of the store for one problem on one device. Each kernel is judged by its own records alone."""

    def __init__(self, op: Op, problem: Problem, target: Target, build: Build, store: Store) -> None:
        self.op, self.problem, self.target, self.build = op, problem, target, build
        self._near: dict[str, list[_Near]] = {}
        own = target_key(target)
        places = (own, *store.siblings(op.name, target))
        for place, (wanted, plain) in product(places, _plainer(problem)):
            for at, timings in store.alike(op, place, wanted):
                if (far := distance(wanted, at, op.dynamic)) > NEAR_LIMIT:
                    continue
                same = op.static(wanted) == op.static(at)
                for timing in timings:
                    interpreted = timing.toolchain.endswith(",interpreter")
                    if deployed(timing) and interpreted == build.triton_interpreter:
                        self._near.setdefault(timing.kernel, []).append(
                            _Near(timing, at, far, same, place != own, plain)
                        )

    def config(self, kernel: Kernel) -> Config | None:
        """The fastest configuration that the present code of `kernel` was measured with, for the same static problem.

        A configuration contains what the launcher needs of the static problem, so the one of another static problem cannot
        be used, however near that is; nor can one that does not fit the dynamic sizes of this problem. One of the product without what is
        beside it (`PLAIN`) is used if the kernel has it for this problem too.
        """
        fit = [
            n
            for n in self._records_of(kernel)
            if n.same
            and of_present_code(kernel, n.timing)
            and kernel.misfit(self.problem, n.timing.config) is None
        ]
        best = _nearest(fit)
        # Records of the problem itself come first, and need no look at the space.
        if best is not None and best.plain:
            own = self._configs(kernel)
            fit = [n for n in fit if not n.plain or config_key(n.timing.config) in own]
            best = _nearest(fit)
        if best is None:
            return None
        return dict(best.timing.config) if best.far == 0 else self._best_fit(kernel, fit, best)

    def _best_fit(self, kernel: Kernel, known: list[_Near], nearest: _Near) -> Config:
        """Of the configurations of near records, and the default one, the fastest for this problem: by the measured time, scaled by the cost
        model of the configuration from the record's sizes to these. The default one is scaled as those records are in the middle. That of
        `nearest` if the kernel has no such model.

        The nearest problem's configuration may be the wrong one: tiles of 128 rows, chosen for 128 rows, take two rounds for 130.
        """
        model = kernel.estimate_config
        if model is None:
            return dict(nearest.timing.config)
        scaled: list[tuple[float, str, Config]] = []
        factors = list[float]()
        default = kernel.config(self.problem, self.target)
        own = model(self.problem, default, self.target)
        for n in known:
            if (n.sibling, n.plain) == (nearest.sibling, nearest.plain):
                here, there = (model(at, n.timing.config, self.target) for at in (self.problem, n.at))
                if here is None or not there:
                    return dict(nearest.timing.config)
                factors.append(n.timing.us / there)
                scaled.append((here * factors[-1], config_key(n.timing.config), n.timing.config))
        if own is not None:
            scaled.append((own * median(factors), config_key(default), default))
        return dict(min(scaled, key=lambda row: row[:2])[2])

    def expected(self, kernel: Kernel, failed: frozenset[str] = frozenset()) -> tuple[float, str] | None:
        """Microseconds and their source; None when nothing near was measured. Configurations in `failed` are ignored.

        A time of this exact problem counts as measured if the code and the toolchain are the present ones, else as near.
        Near times are scaled by the ratio of both problems in the kernel's cost model, which accounts for the distribution of
        work over multiprocessors, or by the device's ceilings and a launch if the kernel has no model. Those do not know what another
        launch after the product takes, so times without it count for kernels with a model alone.
        """
        candidates = [
            n
            for n in self._records_of(kernel)
            if (not failed or config_key(n.timing.config) not in failed)
            and (kernel.estimate is not None or "epilogue" not in n.plain)
        ]
        toolchain = self.build.key()
        exact = [n.timing for n in candidates if n.exact]
        fresh = [t.us for t in exact if t.toolchain == toolchain and of_present_code(kernel, t)]
        if fresh:
            return min(fresh), "measured"
        best = _nearest(candidates)
        if best is None:
            return None
        return best.timing.us * self._scale(kernel, best.at), "sibling" if best.sibling else "near"

    def evidence(self, kernel: Kernel) -> list[tuple[Timing, float, str]]:
        """The records of `kernel` that apply to the problem, the decisive ones first: the record, the distance of its problem in
        powers of two, and its kind (``measured``, ``near`` or ``sibling``)."""
        toolchain = self.build.key()
        ranked = []
        for n in self._records_of(kernel):
            fresh = n.exact and n.timing.toolchain == toolchain and of_present_code(kernel, n.timing)
            ranked.append((n.timing, n.far, "measured" if fresh else "sibling" if n.sibling else "near"))
        order = ("measured", "near", "sibling")
        return sorted(
            ranked, key=lambda f: (order.index(f[2]), f[1], f[0].us, f[0].problem, config_key(f[0].config))
        )

    def _configs(self, kernel: Kernel) -> frozenset[str]:
        """The configurations that the kernel has for the problem, as `config_key`s."""
        space = kernel.space(self.problem, self.target) if kernel.space is not None else ()
        return frozenset(map(config_key, space))

    def _records_of(self, kernel: Kernel) -> list[_Near]:
        return self._near.get(kernel.name, [])

    def _scale(self, kernel: Kernel, at: Problem) -> float:
        if kernel.estimate is not None and kernel.accepts(at) is None:
            target_us, source_us = (
                kernel.estimate(self.problem, self.target),
                kernel.estimate(at, self.target),
            )
            if target_us and source_us:
                return target_us / source_us
        return self._floor(self.problem) / self._floor(at)

    def _floor(self, problem: Problem) -> float:
        """A number that grows as the least time of a launch does; bytes alone where the device's ceilings are unknown."""
        cost = self.op.cost(problem)
        moved, peak = max(cost.bytes, 1), self.target.peak(cost.unit)
        if not self.target.bandwidth_gbs or not peak:
            return moved
        begun = 0.0 if self.target.vendor == "cpu" else LAUNCH_US
        return begun + max(moved / (self.target.bandwidth_gbs * 1e3), cost.flops / (peak * 1e6))


def of_present_code(kernel: Kernel, timing: Timing) -> bool:
    """Whether a time was measured with what `kernel` runs now; one without a hash, as in stores that are shipped, always."""
    return timing.code in ("", kernel.code_hash(timing.config))


def deployed(timing: Timing) -> bool:
    """Whether calls were timed as they come in a model: arguments in memory, calls back to back. Times of hot or isolated calls
    are kept under keys of their own, and rank nothing: kernels would be held against others that were timed otherwise."""
    return not {"hot", "isolated"} & set(timing.timing.split(","))


def _plainer(problem: Problem) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """The problem, then without each and all of its axes of `PLAIN`, and these."""
    values = dict(problem.values)
    beside = [axis for axis, plain in PLAIN.items() if values.get(axis, plain) != plain]
    for count in range(len(beside) + 1):
        for axes in combinations(beside, count):
            yield problem.with_values(**{axis: PLAIN[axis] for axis in axes}), axes


def _nearest(known: list[_Near]) -> _Near | None:
    """The nearest, then fastest; among equals by the text of the configuration, so that no order of records matters."""
    if not known:
        return None
    best = min(n.rank for n in known)
    return min(
        (n for n in known if n.rank == best),
        key=lambda n: (str(n.at), config_key(n.timing.config)),
    )
