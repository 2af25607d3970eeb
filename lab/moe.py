"""Experts of a layer on one GPU: registered kernels of `moe` side by side, next to the floors of memory and matrix products.

    python -m lab.moe --out result.json
    python -m lab.moe --cases e128_int4_g128_64 --set mt1=8,16,32

CUDA graphs over weights and routings in turn, as many as it takes to read four times the L2 before a routing comes again. Routing is
skewed (`Draw.experts`, power 1.5), without foreign ids; uniform over the experts of all ranks where several share them. A kernel
without 8-bit activations runs such a case with activations in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.moe._clamped import ALPHA, LIMIT
from gristmill.kernels.moe.moe.op import OP
from gristmill.kernels.random_inputs import Draw
from gristmill.quant import QuantTensor, pack, quantize
from lab.gpu_graphs import DEVICE, cold_count
from lab.kernel_timing import Calls, Launch, Sweep, compare, program

KERNELS = "moe_sm90,moe_epilogue_sm90,moe_w8a8_sm90,moe_chain_w_triton"
ROUNDED = 4
READ_FLOOR, MATRIX_FLOOR, MATRIX_FLOOR_8_BITS = 4.5e6, 785e6, 1430e6
"""Bytes and operations per microsecond of an H200."""


@dataclass(frozen=True)
class Case:
    """A layer and the tokens of a call. Each of `ranks` ranks has `experts` of its experts; tokens are those of all ranks."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    scheme: str
    tokens: int
    epilogue: str = "none"
    ranks: int = 1

    @property
    def layer(self) -> tuple[int, int, int, str]:
        """What its weights follow from."""
        return self.experts, self.hidden, self.inner, self.scheme

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
    f"{name}_{layer[4].partition('.')[0]}_w8a8_{tokens}": Case(*layer, tokens, ranks=ranks)
    for name, layer, ranks in (
        ("e128", (128, 8, 2048, 768, "fp8_block.fp8_g128"), 1),
        ("deepseek_ep8", (32, 8, 7168, 2048, "fp8_block.fp8_g128"), 8),
        ("e128", (128, 8, 2048, 768, "fp8_ch.fp8_token"), 1),
    )
    for tokens in (1, 16, 64, 256, 1024, 4096)
}
"""FP8 checkpoints of Qwen3-30B-A3B, and of DeepSeek-V3 on one of eight ranks that share its 256 experts."""
CASES |= {
    "smallest": Case(3, 2, 64, 32, "int4_ch", 3),
    "smallest_clamped": Case(3, 2, 64, 32, "mxfp4", 3, GPT_OSS),
    "smallest_w8a8": Case(3, 2, 64, 32, "fp8_block.fp8_g128", 3, ranks=2),
}


class Inputs:
    """Routings and tokens of a case, and the number of copies of its weights, so that what a call reads has left the cache."""

    def __init__(self, case: Case) -> None:
        self.problem = OP.problem(case.problem)
        e, h, i = case.experts, case.hidden, case.inner
        self.layer = case.layer
        self.expert_bytes = sum(_bytes(weight) for weight in weights_of(*case.layer)) // e
        self.out = torch.empty(case.tokens, h, dtype=torch.bfloat16, device=DEVICE)
        self.sets = []
        self.copies = min(16, cold_count(self.expert_bytes * e))
        read = self.expert_bytes * min(e, case.tokens * case.top_k)
        for seed in range(min(64, max(self.copies, cold_count(read)))):
            draw = Draw(self.problem.with_values(e=e * case.ranks), seed, DEVICE)
            ids = draw.experts(case.tokens, case.top_k, power=1.5 if case.ranks == 1 else 1.0, foreign=0.0)
            ids = torch.where(ids < e, ids, -1)
            x = torch.randn(case.tokens, h, device=DEVICE, dtype=torch.bfloat16)
            self.sets.append((x, torch.rand(case.tokens, case.top_k, device=DEVICE), ids.to(DEVICE)))
        flags = self.problem.flags("epilogue")
        biases = [
            torch.randn(e, n, device=DEVICE, dtype=torch.bfloat16) if name in flags else None
            for name, n in (("w13_bias", 2 * i), ("w2_bias", h))
        ]
        self.epilogue = (*biases, "clamp" in flags, ALPHA, LIMIT)
        mine = self.sets[0][2].flatten().long()
        counts = torch.bincount(mine[mine >= 0], minlength=e)
        self.distinct, self.fullest = int((counts > 0).sum()), int(counts.max())


@lru_cache(maxsize=1)
def weights_of(experts: int, hidden: int, inner: int, scheme: str) -> list[QuantTensor]:
    """Both weights of a layer, which all numbers of tokens share: `ROUNDED` experts over and over, since rounding takes longest."""
    return [
        _repeated(quantize(torch.randn(min(experts, ROUNDED), *shape, device=DEVICE), scheme), experts)
        for shape in ((2 * inner, hidden), (hidden, inner))
    ]


def _repeated(weight: QuantTensor, experts: int) -> QuantTensor:
    count = weight.shape[0]
    order = torch.arange(experts, device=DEVICE) % count
    return weight.with_tensors(
        {name: tensor[order] for name, tensor in weight.tensors().items()}, (experts, *weight.shape[1:])
    )


@lru_cache(maxsize=2)
def copies_of(layer: tuple[int, int, int, str], layout: str, count: int) -> list[list[list[torch.Tensor]]]:
    """Copies of both weights of a layer, packed."""
    packed = [pack(weight, layout).tensors for weight in weights_of(*layer)]
    return [[[t.clone() for t in tensors] for tensors in packed] for _ in range(count)]


def problem_of(kernel: Kernel, problem: Problem) -> Problem:
    """The problem as a kernel runs it: with activations in their own dtype if it has no 8-bit ones. ValueError if it does not run it."""
    refusal = kernel.accepts(problem)
    if refusal is None:
        return problem
    floats = problem.with_values(w=str(QuantScheme.parse(problem.text("w")).without_activation))
    if kernel.accepts(floats) is None:
        return floats
    raise ValueError(f"{kernel.name}: {refusal}")


def _bytes(weight: QuantTensor) -> int:
    tensors = (weight.codes, weight.scales, weight.zero)
    return sum(t.nbytes for t in tensors if t is not None)


def calls_of(inputs: Inputs, name: str, changes: dict[str, int]) -> Calls:
    """Calls of a registered kernel with its default configuration, updated by `changes`: one per routing, over copies of the weights in turn."""
    kernel = default_registry().kernel(OP.name, name)
    problem = problem_of(kernel, inputs.problem)
    launch = Launch(kernel, problem, changes, DEVICE)
    scheme = problem.text("w")
    layout = next(one for one in kernel.layouts if default_registry().layout(one).accepts(scheme))
    copies = copies_of(inputs.layer, layout, inputs.copies)
    calls: Calls = []
    inner = inputs.problem.integer("i")
    for number, arguments in enumerate(inputs.sets):
        w13, w2 = copies[number % len(copies)]
        rest = (inner, launch.workspace, *inputs.epilogue)
        calls.append(launch.call(*arguments, w13, w2, *rest, out=inputs.out))
    return calls


def timed(name: str, kernels: list[str], sweep: Sweep | None, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a case: samples and medians in microseconds, and the floors of what the first routing reads and multiplies."""
    case = CASES[name]
    problem = OP.problem(case.problem)
    problems, refused = {}, {}
    for kernel in (default_registry().kernel(OP.name, kernel) for kernel in kernels):
        try:
            problems[kernel.name] = str(problem_of(kernel, problem))
        except ValueError as error:
            refused[kernel.name] = str(error)
    kernels = list(problems)
    if not kernels:
        raise ValueError(f"{name}: no kernel runs it: {refused}")
    inputs = Inputs(case)
    found = compare(kernels, sweep, partial(calls_of, inputs), inputs.out, rounds, seconds)
    read = inputs.distinct * inputs.expert_bytes + 4 * case.tokens * case.hidden
    flops = 6 * case.tokens * case.top_k // case.ranks * case.hidden * case.inner
    rate = MATRIX_FLOOR if QuantScheme.parse(case.scheme).activation is None else MATRIX_FLOOR_8_BITS
    return {
        "case": name,
        "problem": str(inputs.problem),
        "problems": problems,
        "refused": refused,
        "copies": inputs.copies,
        "routings": len(inputs.sets),
        "distinct_experts": inputs.distinct,
        "fullest_expert": inputs.fullest,
        "read_floor_us": round(read / READ_FLOOR, 2),
        "matrix_floor_us": round(flops / rate, 2),
        **found,
    }


def main() -> int:
    return program("moe", __doc__, CASES, KERNELS, timed, ("us", "difference"))


if __name__ == "__main__":
    raise SystemExit(main())
