"""A cell: its candidates are checked against the reference, and those that are right are timed in turn."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gristmill.autotune.metrics import error_of
from gristmill.autotune.timing import MAX_SETS
from gristmill.autotune.verify import run_reference
from gristmill.bench.result_text import quantiles
from gristmill.kernel_registry.op import Cost
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import NoKernelError
from gristmill.kernel_registry.store import Store
from gristmill.quant import QuantTensor
from lab.gpu_graphs import Graphs, add_time, cold_count
from lab.peers.adapter import Adapter, Arguments, Peer, Run
from lab.peers.group import Cell, Group, weights_in
from lab.peers.ours import Choice, Selection

SAMPLE_US, MOST_CALLS = 4000.0, 400
"""A graph takes at least so long, unless it would have more calls."""
CANDIDATES = "[name, median µs, lower quartile, upper quartile, error]"
"""What the rows of result files have of a candidate."""
INEXACT = 1.5
"""Up to so many times the tolerance the error of a peer may be: one that rounds more often than ours must not leave a cell without a rival."""
FREE_BLOCKS = 4
"""Blocks of an output's size that a call may find free."""
BYTES_PER_US, FLOPS_PER_US, SHORTEST_US = 4e6, 7e8, 2.0
"""Rates of an H200 and the shortest call: they decide the number of calls, nothing else."""


class LostDeviceError(RuntimeError):
    """A candidate has left the device unusable: a new process goes on with the next cell."""


@dataclass(frozen=True)
class Settings:
    """How cells are measured.

    Attributes:
        others: kernels of ours beside the selected one.
        configurations: kernels of ours of which every configuration is a candidate, too, named by its place in the kernel's own order.
        settle: seconds of replays before the samples.
        copies: of the arguments; 0 = as many as it takes to leave the cache.
    """

    device: str
    rounds: int = 9
    others: int = 2
    configurations: tuple[str, ...] = ()
    settle: float = 0.05
    copies: int = 0


@dataclass
class _Found:
    """What is known of a cell's candidates, by name; `refused` has what they raised, `inexact` are peers with times that are a little wrong."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float | None] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    inexact: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def candidates(self) -> list[list[Any]]:
        """`CANDIDATES` of those that have times, the fastest first."""
        quartiles = {name: quantiles(times)[2:5] for name, times in self.samples.items()}
        rows = [
            [name, middle, low, high, self.errors[name]] for name, (low, middle, high) in quartiles.items()
        ]
        return sorted(rows, key=lambda row: row[1])


class Race:
    """Measures cells one after the other. Cells with the same weights share them, and each candidate's packed form of them."""

    def __init__(self, settings: Settings, peers: Sequence[Peer]) -> None:
        self.settings, self.peers = settings, peers
        self.selection = Selection(settings.device)
        self.times = Store()
        """Of our kernels, in the form in which times are shipped; what was there before is kept."""
        self._weights: tuple[QuantTensor, ...] = ()
        self._packed: dict[str, dict[int, Any]] = {}

    def row(self, group: Group, cell: Cell) -> dict[str, Any]:
        """The row of a cell. LostDeviceError: no further cell can be measured by this process."""
        op, problem = default_registry().op(group.op), group.problem(cell)
        row: dict[str, Any] = {
            "group": group.name,
            "model": cell.model,
            "problem": cell.problem,
        }
        row |= {"kernel": None, "config": None, "source": None, "code": None, "others": []}
        found, ours = _Found(), dict[str, Choice]()
        try:
            choices = self.selection.choices(op, problem, self.settings.others)
        except NoKernelError as error:
            found.refused["gristmill"] = str(error).partition("\n")[0]
        else:
            chosen = choices[0]
            row |= {"kernel": chosen.kernel.name, "config": dict(chosen.config), "source": chosen.source}
            row["code"] = chosen.kernel.code_hash(chosen.config)
            row["others"] = [choice.kernel.name for choice in choices[1:]]
            ours |= {choice.kernel.name: choice for choice in choices}
        every = {
            f"{choice.kernel.name}/{place}": choice
            for name in self.settings.configurations
            for place, choice in enumerate(self.selection.configurations(op, problem, name))
        }
        if every:
            ours |= every
            row["configurations"] = {name: dict(choice.config) for name, choice in every.items()}
        adapters = {name: choice.adapter for name, choice in ours.items()}
        for peer in self.peers:
            for name, adapter in peer.of(op.name).items():
                if adapter.accepts(problem) is None:
                    adapters[name] = adapter
        row["limit"] = group.limit_of(problem)
        self._measure(group, cell, adapters, {*ours}, found)
        for name, choice in ours.items():
            if name in found.samples:
                us = statistics.median(found.samples[name])
                add_time(self.times, problem, choice.kernel.name, choice.config, us, self.settings.device)
        row |= against_best_peer(found.samples, row["kernel"], {*ours})
        row |= {"candidates": found.candidates, "wrong": found.wrong, "refused": found.refused}
        inexact = {name: why for name, why in found.inexact.items() if name in found.samples}
        return row | ({"inexact": inexact} if inexact else {})

    def _measure(
        self, group: Group, cell: Cell, adapters: Mapping[str, Adapter], ours: set[str], found: _Found
    ) -> None:
        op, problem, device = default_registry().op(group.op), group.problem(cell), self.settings.device
        arguments = group.inputs(problem, device)
        references, limit, cost = run_reference(op, arguments), group.limit_of(problem), op.cost(problem)
        count = self.settings.copies or min(MAX_SETS, cold_count(cost.bytes))
        runs, held = dict[str, list[Run]](), []
        first = dict[str, Arguments]()

        def is_right(name: str) -> bool:
            """Whether the first call gives what it should, of a peer nearly; its outputs are held."""
            _poison_free_memory(references)
            held.append(result := runs[name][0]())
            held.append(outputs := adapters[name].outputs(first[name], result))
            compare = error_of if name in ours else group.error
            figure = compare(op, problem, arguments, outputs, references)
            found.errors[name] = figure if math.isfinite(figure) else None
            found.inexact.pop(name, None)
            if figure <= limit:
                return True
            over = f"error {figure:.3g} is over the tolerance {limit:.3g}"
            if name not in ours and figure <= INEXACT * limit:
                found.inexact[name] = over
                return True
            found.wrong[name] = over
            return False

        for name, adapter in adapters.items():
            try:
                packed = self._with_packed(name, adapter, group, cell, arguments)
                sets = [group.vary(problem, packed, index) for index in range(count)]
                first[name], runs[name] = sets[0], [adapter.bind(problem, one) for one in sets]
                if is_right(name):
                    continue
            except Exception as error:  # whatever a library raises is a reason
                found.refused[name] = f"{type(error).__name__}: {str(error)[:300]}"
                _still_usable(device)
            runs.pop(name, None)
        held.clear()
        self._time(runs, calls_of(cost, count) if not self.settings.copies else count, found)
        if any(parameter.mutable and parameter.name != "workspace" for parameter in op.parameters):
            return  # its inputs are not what they were
        for name in [*found.samples]:
            if not is_right(name):
                found.wrong[name] += ", after it was timed"
                del found.samples[name]

    def _time(self, runs: Mapping[str, list[Run]], calls: int, found: _Found) -> None:
        graphs, captured = Graphs(self.settings.device), self.settings.device != "cpu"
        if captured:
            gc.collect()
            gc.freeze()  # a capture collects garbage
        for name, bound in runs.items():
            try:
                graphs.add(name, [bound[index % len(bound)] for index in range(calls)])
            except RuntimeError as error:
                found.refused[name] = f"cannot be captured: {str(error)[:300]}"
                _still_usable(self.settings.device)
        if graphs.timed:
            graphs.settle(self.settings.settle)
            found.samples |= graphs.samples(self.settings.rounds)
        if captured:
            gc.unfreeze()
        del graphs
        if captured:
            torch.cuda.empty_cache()  # memory of graphs serves no others

    def _with_packed(
        self, name: str, adapter: Adapter, group: Group, cell: Cell, arguments: Arguments
    ) -> Arguments:
        """The arguments as an adapter takes them; packed before if the last cell had the same weights."""
        weights = weights_in(arguments)
        if not weights:
            return adapter.pack(group.problem(cell), arguments)
        if tuple(map(id, weights)) != tuple(map(id, self._weights)):  # which are kept, so ids are not reused
            self._weights, self._packed = weights, {}
        if name not in self._packed:
            packed = adapter.pack(group.problem(cell), arguments)
            replaced = {
                i: new for i, (new, old) in enumerate(zip(packed, arguments, strict=True)) if new is not old
            }
            self._packed[name] = replaced
        return [self._packed[name].get(index, argument) for index, argument in enumerate(arguments)]


def _poison_free_memory(references: Sequence[torch.Tensor]) -> None:
    """What a call allocates for its outputs next must not hold the right ones. Those of other candidates are not free meanwhile."""
    poisoned = [
        torch.full_like(reference, float("nan") if reference.is_floating_point() else -1)
        for reference in references
        for _ in range(FREE_BLOCKS)
    ]
    del poisoned


def _still_usable(device: str) -> None:
    """LostDeviceError after a fault of the device, which every later call would report."""
    if device == "cpu":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise LostDeviceError(str(error)) from error


def calls_of(cost: Cost, copies: int) -> int:
    """Calls of a graph: over all copies at least once, and as many as take `SAMPLE_US`, by what the problem moves and computes."""
    fastest = max(cost.bytes / BYTES_PER_US, cost.flops / FLOPS_PER_US, SHORTEST_US)
    return max(copies, min(MOST_CALLS, math.ceil(SAMPLE_US / fastest)))


def against_best_peer(
    samples: Mapping[str, Sequence[float]], kernel: str | None, ours: set[str]
) -> dict[str, Any]:
    """The best peer, and the time of our selected kernel over its time: the median over rounds. None where one of the two is missing."""
    peers = {name: statistics.median(times) for name, times in samples.items() if name not in ours}
    if not peers or kernel is None or kernel not in samples:
        return {"peer": None, "ratio": None}
    best = min(peers, key=lambda name: peers[name])
    pairs = zip(samples[kernel], samples[best], strict=True)
    return {"peer": best, "ratio": statistics.median(mine / theirs for mine, theirs in pairs)}
