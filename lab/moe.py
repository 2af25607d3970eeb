"""Experts of a layer on one GPU: registered kernels of `moe` side by side, next to the floors of memory and matrix products.

    python -m lab.moe --out result.json
    python -m lab.moe --cases e128_int4_g128_64 --set mt1=8,16,32

CUDA graphs over weights and routings in turn, as many as it takes to read four times the L2 before a routing comes again. Routing is
skewed (`Draw.experts`, power 1.5), without foreign ids.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.moe._clamped import ALPHA, LIMIT
from gristmill.kernels.moe.moe import OP
from gristmill.kernels.random_inputs import Draw
from gristmill.quant import QuantTensor, pack, quantize
from lab.attention_timing import Sweep, compare, parser, sweep_of
from lab.gpu_graphs import DEVICE, cold_count, environment

KERNELS = "moe_sm90,moe_epilogue_sm90,moe_chain_w_triton"
READ_FLOOR, MATRIX_FLOOR = 4.5e6, 785e6
"""Bytes and operations per microsecond of an H200."""


@dataclass(frozen=True)
class Case:
    """A layer and the tokens of a call."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    scheme: str
    tokens: int
    epilogue: str = "none"

    @property
    def problem(self) -> str:
        sizes = f"m={self.tokens},top_k={self.top_k},e={self.experts},h={self.hidden},i={self.inner}"
        return f"{sizes},w={self.scheme},epilogue={self.epilogue}"


GPT_OSS = "w13_bias+w2_bias+clamp"
LAYERS = (
    ("e128", (128, 8, 2048, 768, "int4_g128")),
    ("e8", (8, 2, 4096, 14336, "int4_g128")),
    ("e32", (32, 4, 2880, 2880, "mxfp4")),
)
"""The experts of Qwen3-30B-A3B, Mixtral 8x7B and, without biases and clamp, gpt-oss-20b."""
CASES = {
    f"{name}_{layer[4]}_{tokens}": Case(*layer, tokens)
    for name, layer in LAYERS
    for tokens in (1, 16, 64, 256, 1024, 4096)
}
CASES |= {
    f"gptoss_e{experts}_mxfp4_{tokens}": Case(experts, 4, 2880, 2880, "mxfp4", tokens, GPT_OSS)
    for experts in (32, 128)
    for tokens in (1, 16, 64, 256, 1024, 4096)
}
CASES |= {
    "smallest": Case(3, 2, 64, 32, "int4_ch", 3),
    "smallest_clamped": Case(3, 2, 64, 32, "mxfp4", 3, GPT_OSS),
}


class Inputs:
    """Routings and tokens of a case, and the number of copies of its weights, so that what a call reads has left the cache."""

    def __init__(self, case: Case) -> None:
        self.problem = OP.problem(case.problem)
        e, h, i = case.experts, case.hidden, case.inner
        self.weights = [
            quantize(torch.randn(e, n, k, device=DEVICE), case.scheme) for n, k in ((2 * i, h), (h, i))
        ]
        self.expert_bytes = sum(_bytes(weight) for weight in self.weights) // e
        self.out = torch.empty(case.tokens, h, dtype=torch.bfloat16, device=DEVICE)
        self.sets = []
        self.copies = min(16, cold_count(self.expert_bytes * e))
        read = self.expert_bytes * min(e, case.tokens * case.top_k)
        for seed in range(min(64, max(self.copies, cold_count(read)))):
            ids = Draw(self.problem, seed, DEVICE).experts(case.tokens, case.top_k, power=1.5, foreign=0.0)
            x = torch.randn(case.tokens, h, device=DEVICE, dtype=torch.bfloat16)
            self.sets.append((x, torch.rand(case.tokens, case.top_k, device=DEVICE), ids.to(DEVICE)))
        flags = self.problem.flags("epilogue")
        biases = [
            torch.randn(e, n, device=DEVICE, dtype=torch.bfloat16) if name in flags else None
            for name, n in (("w13_bias", 2 * i), ("w2_bias", h))
        ]
        self.epilogue = (*biases, "clamp" in flags, ALPHA, LIMIT)
        counts = torch.bincount(self.sets[0][2].flatten().long(), minlength=e)
        self.distinct, self.fullest = int((counts > 0).sum()), int(counts.max())


def _bytes(weight: QuantTensor) -> int:
    tensors = (weight.codes, weight.scales, weight.zero)
    return sum(t.nbytes for t in tensors if t is not None)


def calls_of(inputs: Inputs, name: str, changes: dict[str, int]) -> list[Callable[[], Any]]:
    """Calls of a registered kernel with its default configuration, updated by `changes`: one per routing, over copies of the weights in turn."""
    kernel = default_registry().kernel(OP.name, name)
    refusal = kernel.accepts(inputs.problem)
    if refusal is not None:
        raise ValueError(f"{name}: {refusal}")
    config = {**kernel.config(inputs.problem, device_target(DEVICE, Policy())), **changes}
    size, launch = kernel.workspace(inputs.problem, config).bytes, kernel.load()
    space = torch.zeros(max(1, size), dtype=torch.uint8, device=DEVICE)
    scheme = inputs.problem.text("w")
    layout = next(one for one in kernel.layouts if default_registry().layout(one).accepts(scheme))
    packed = [pack(weight, layout).tensors for weight in inputs.weights]
    copies = [[[t.clone() for t in tensors] for tensors in packed] for _ in range(inputs.copies)]
    calls: list[Callable[[], Any]] = []
    inner = inputs.problem.integer("i")
    for number, arguments in enumerate(inputs.sets):
        w13, w2 = copies[number % len(copies)]
        calls.append(partial(launch, config, *arguments, w13, w2, inner, space, *inputs.epilogue, inputs.out))
    return calls


def timed(name: str, kernels: list[str], sweep: Sweep | None, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a case: samples and medians in microseconds, and the floors of what the first routing reads and multiplies."""
    case = CASES[name]
    problem = OP.problem(case.problem)
    refused = {name: default_registry().kernel(OP.name, name).accepts(problem) for name in kernels}
    kernels = [name for name in kernels if refused[name] is None]
    if not kernels:
        raise ValueError(f"{name}: no kernel runs it: {refused}")
    inputs = Inputs(case)
    samples, us, difference = compare(kernels, sweep, partial(calls_of, inputs), inputs.out, rounds, seconds)
    read = inputs.distinct * inputs.expert_bytes + 4 * case.tokens * case.hidden
    flops = 6 * case.tokens * case.top_k * case.hidden * case.inner
    return {
        "case": name,
        "problem": str(inputs.problem),
        "refused": {name: reason for name, reason in refused.items() if reason is not None},
        "copies": inputs.copies,
        "routings": len(inputs.sets),
        "distinct_experts": inputs.distinct,
        "fullest_expert": inputs.fullest,
        "read_floor_us": round(read / READ_FLOOR, 2),
        "matrix_floor_us": round(flops / MATRIX_FLOOR, 2),
        "us": us,
        "difference": difference,
        "samples": samples,
    }


def main() -> int:
    options = parser(__doc__, CASES, KERNELS).parse_args()
    sweep, before, rows = sweep_of(options.set), environment(), []
    command = "python -m lab.moe " + shlex.join(sys.argv[1:])
    for name in options.cases.split(","):
        rows.append(timed(name, options.kernels.split(","), sweep, options.rounds, options.seconds))
        print(name, rows[-1]["us"], rows[-1]["difference"], flush=True)
        if options.out:
            result = {"command": command, "before": before, "after": environment(), "rows": rows}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
