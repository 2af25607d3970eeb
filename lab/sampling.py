"""Times of the kernels that sample, from CUDA graphs of calls over logits that are not in the cache:

    python -m lab.sampling --out sample.json

A case is ROWS_VOCABULARY_KIND: greedy, top_k (40), top_p (0.9), both (with a min_p of 0.05), or mixed: the inputs of the operation's tests,
in which greedy rows and all filters alternate, and in every second row 5 % of the tokens share the largest logit. The other kinds draw
logits from a normal distribution of width 2. `floor` in a row: the fastest kernel that reads as many cold bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gristmill.kernel_registry.registry import default_registry
from lab.gpu_graphs import DEVICE, cold_count, floor_us
from lab.kernel_timing import Calls, Launch, Sweep, compare, program

OP = default_registry().op("sample")
KERNELS = "sample_sm90,sample_triton"
KINDS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "top_k": (0.8, 40, 1.0, 0.0),
    "top_p": (0.8, 0, 0.9, 0.0),
    "both": (0.8, 40, 0.9, 0.05),
    "mixed": None,
}
"""temperature, top_k, top_p and min_p of all rows; None: those of the operation's tests."""
CASES = (
    "smallest",
    *(
        f"{m}_{v}_{kind}"
        for v in (128256, 151936)
        for m in (1, 8, 16, 32, 64, 128, 256, 512)
        for kind in KINDS
        if v == 128256 or kind in ("greedy", "both")
    ),
)


def inputs(m: int, v: int, kind: str, copies: int) -> list[list[torch.Tensor]]:
    """The arguments of `copies` calls, each with logits of its own."""
    settings = KINDS[kind]
    problem = OP.problem(f"m={m},v={v}")
    if settings is None:
        first: list[Any] = list(OP.inputs(problem, 0, DEVICE))[:7]
        return [[first[0].clone(), *first[1:]] for _ in range(copies)]
    types = (torch.float32, torch.int32, torch.float32, torch.float32)
    rows = [
        torch.full((m,), value, dtype=dtype, device=DEVICE)
        for value, dtype in zip(settings, types, strict=True)
    ]
    rows += [torch.arange(m, device=DEVICE), torch.arange(m, device=DEVICE)]
    return [[2 * torch.randn(m, v, device=DEVICE), *rows] for _ in range(copies)]


def calls_of(
    arguments: list[list[torch.Tensor]], out: torch.Tensor, name: str, changes: dict[str, int]
) -> Calls:
    """Calls of a registered kernel with its default configuration and `changes`."""
    problem = OP.problem("m={},v={}".format(*arguments[0][0].shape))
    launch = Launch(default_registry().kernel(OP.name, name), problem, changes, DEVICE)
    return [launch.call(*one, launch.workspace, out) for one in arguments]


def timed(case: str, kernels: list[str], sweep: Sweep | None, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a case: samples and medians in microseconds."""
    rows, vocabulary, kind = ("2_257_mixed" if case == "smallest" else case).split("_", 2)
    m, v = int(rows), int(vocabulary)
    arguments = inputs(m, v, kind, min(32, cold_count(4 * m * v)))
    out = torch.empty(m, dtype=torch.int64, device=DEVICE)
    found = compare(kernels, sweep, partial(calls_of, arguments, out), out, rounds, seconds)
    return {
        "case": case,
        "copies": len(arguments),
        "floor": 0.0 if DEVICE == "cpu" else round(floor_us(4 * m * v)[0], 2),
        "us": found["us"],
        "samples": found["samples"],
    }


def main() -> int:
    return program("sampling", __doc__, CASES, KERNELS, timed, ("floor", "us"))


if __name__ == "__main__":
    raise SystemExit(main())
