"""Fit the model of time of gemm_ws (kernels/linear/frag16_sm90/gemm_ws.py) to times of every configuration.

    python -m lab.linear_weight_only --tuned --alone --kernels linear_w4a16_gemm_ws_sm90 --out table.json --times times.json
    python -m lab.gemm_ws_costs --out costs.json times.json

A row of the result is a shape: costs before and after, the error of both (the mean of |ln(expected / measured)|), and over all problems in
which the shape is one of several, what the choice costs: the time of the configuration that the model expects to be the fastest, over that of the
fastest, a geometric mean.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, fsum, log
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.linear.frag16_sm90.gemm_ws import (
    COSTS,
    Costs,
    Partition,
    Shape,
    described,
    microseconds,
)
from gristmill.kernels.linear.frag16_sm90.instances import Format, formats
from lab.result import write_result

PROCESSORS = 132
STEPS = (0.5, 0.2, 0.08, 0.03, 0.01)
"""Relative sizes of the steps of the search, one after the other."""


class Sample(NamedTuple):
    """A configuration of a problem, and its microseconds."""

    form: Format
    shape: Shape
    partition: Partition
    m: int
    n: int
    k: int
    us: float

    def expected(self, costs: Costs) -> float:
        """Microseconds by these costs."""
        return microseconds(self.form, self.shape, self.partition, self.m, self.n, self.k, PROCESSORS, costs)


def read(rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """The samples among the rows of a file of `lab.linear_weight_only --times`."""
    op, samples = default_registry().op("linear"), []
    for row in rows:
        if "_gemm_ws_" not in row["kernel"]:
            continue
        config, problem = row["config"], op.problem(row["problem"])
        form = formats()[config["format"]]
        shape, partition = described(form, config)
        m, n, k = problem.integers(*"mnk")
        samples.append(Sample(form, shape, partition, m, n, k, row["us"]))
    return samples


def error(samples: Sequence[Sample], costs: Costs) -> float:
    """The mean of |ln(expected / measured)|."""
    return fsum(abs(log(max(sample.expected(costs), 0.1) / sample.us)) for sample in samples) / len(samples)


def descend(start: Costs, loss: Callable[[Costs], float]) -> Costs:
    """Costs, none below 0, from which no step of one of them makes the loss less."""
    best, least = start, loss(start)
    for step in STEPS:
        better = True
        while better:
            better = False
            for name, value in best._asdict().items():
                for change in (step, -step):
                    tried = best._replace(**{name: max(0.0, value + change * max(value, 0.1))})
                    if (found := loss(tried)) < least * (1 - 1e-6):
                        best, least, better = tried, found, True
                        break
    return best


def chosen(samples: Sequence[Sample], costs: Mapping[tuple[int, int, int, int], Costs]) -> float:
    """The time of what the model chooses over that of the fastest: the geometric mean over problems."""
    problems: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        problems.setdefault((sample.form.name, sample.m, sample.n, sample.k), []).append(sample)
    ratios = [
        min(of, key=lambda sample: sample.expected(costs[sample.shape[:4]])).us / min(s.us for s in of)
        for of in problems.values()
    ]
    return exp(fsum(map(log, ratios)) / len(ratios))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("times", type=Path, nargs="+", help="files of lab.linear_weight_only --times")
    options = parser.parse_args()
    samples = [sample for path in options.times for sample in read(json.loads(path.read_text())["rows"])]
    fitted, rows = dict(COSTS), []
    for key in sorted({sample.shape[:4] for sample in samples}):
        own = [sample for sample in samples if sample.shape[:4] == key]
        found = descend(COSTS[key], partial(error, own))
        fitted[key] = Costs(*(round(value, 4) for value in found))
        rows.append(
            {
                "shape": key,
                "samples": len(own),
                "before": COSTS[key],
                "error_before": error(own, COSTS[key]),
                "after": fitted[key],
                "error_after": error(own, fitted[key]),
            }
        )
        print(
            f"    {key}: Costs{tuple(fitted[key])},  # {rows[-1]['error_before']:.3f} -> {rows[-1]['error_after']:.3f}"
        )
    choice = {"before": chosen(samples, COSTS), "after": chosen(samples, fitted)}
    print("what the choice costs:", choice)
    command = f"python -m lab.gemm_ws_costs {shlex.join(sys.argv[1:])}"
    write_result(options.out, {"command": command, "choice": choice, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
