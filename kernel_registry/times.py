"""Measured times as they bear on one problem: exact ones, near ones scaled, and those of a sibling device."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.store import NEAR_LIMIT, Store, Timing, config_key, distance, target_key
from gristmill.kernel_registry.target import Target


@dataclass(frozen=True)
class _Near:
    """A measured time and how far its problem is from the one at hand. sibling: taken on another device."""

    timing: Timing
    at: Problem
    far: float
    sibling: bool


class Times:
    """What the store knows of one problem on one device. Each kernel is judged by its own records alone."""

    def __init__(self, op: Op, problem: Problem, target: Target, build: Build, store: Store) -> None:
        self.op, self.problem, self.target, self.build = op, problem, target, build
        self._near: dict[str, list[_Near]] = {}
        seen: dict[str, tuple[Problem, float] | None] = {}
        own = target_key(target)
        for sibling, records in ((False, store.times(op.name, own)), (True, store.sibling_times(op.name, target))):
            for timing in records:
                if timing.problem not in seen:
                    at = store.problem(op, timing.problem)
                    far = None if at is None else distance(problem, at, op.dynamic)
                    seen[timing.problem] = None if at is None or far is None or far > NEAR_LIMIT else (at, far)
                place = seen[timing.problem]
                if place is not None and timing.toolchain.endswith(",interpreter") == build.triton_interpreter:
                    self._near.setdefault(timing.kernel, []).append(_Near(timing, *place, sibling))

    def config(self, kernel: Kernel) -> Config | None:
        """The fastest configuration that the present code of `kernel` was measured with, for the same static problem.

        What a launcher must know of the static problem is in its configuration, so one of another static problem is of
        no use however near that is.
        """
        static = self.op.static(self.problem)
        fit = [n for n in self._of(kernel) if self._current(n, kernel) and (n.far == 0 or self.op.static(n.at) == static)]
        best = min(fit, key=_by_distance, default=None)
        return None if best is None else dict(best.timing.config)

    def expected(self, kernel: Kernel, failed: frozenset[str] = frozenset()) -> tuple[float, str] | None:
        """Microseconds and their source; None when nothing near was measured. failed: configurations that do not count.

        A time of this very problem counts as measured if the code and the toolchain are the present ones, else as near.
        Near times are scaled by what the device's ceilings make of both problems.
        """
        known = [n for n in self._of(kernel) if not failed or config_key(n.timing.config) not in failed]
        exact = [n for n in known if n.far == 0 and not n.sibling and self._fresh(n, kernel)]
        if exact:
            return min(n.timing.us for n in exact), "measured"
        best = min(known, key=_by_distance, default=None)
        if best is None:
            return None
        return best.timing.us * self._scale(best.at), "sibling" if best.sibling else "near"

    def _of(self, kernel: Kernel) -> list[_Near]:
        return self._near.get(kernel.name, [])

    def _current(self, near: _Near, kernel: Kernel) -> bool:
        return near.timing.code in ("", kernel.code_hash())

    def _fresh(self, near: _Near, kernel: Kernel) -> bool:
        return self._current(near, kernel) and near.timing.toolchain == self.build.key()

    def _scale(self, at: Problem) -> float:
        return self._floor(self.problem) / self._floor(at)

    def _floor(self, problem: Problem) -> float:
        """A number that grows as the least possible time does; bytes alone where the device's ceilings are unknown."""
        cost = self.op.cost(problem)
        moved, peak = max(cost.bytes, 1), self.target.peak(cost.unit)
        if not self.target.bandwidth_gbs or not peak:
            return moved
        return max(moved / (self.target.bandwidth_gbs * 1e3), cost.flops / (peak * 1e6))


def _by_distance(near: _Near) -> tuple[bool, float, float, str]:
    return near.sibling, near.far, near.timing.us, config_key(near.timing.config)
