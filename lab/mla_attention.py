"""Latent attention of given lengths on one GPU: registered kernels side by side, next to the floors of memory and matrix products.

    python -m lab.mla_attention --out result.json
    python -m lab.mla_attention --cases b1_h16_4k,b128_h128_4k --set slack=0,4,16

CUDA graphs over caches that rotate through four times the L2, replayed in turn; block tables are shuffled, queries random.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.mla_attention.op import OP
from lab.gpu_graphs import DEVICE, cold_count, floor_us
from lab.kernel_timing import Calls, Launch, Sweep, block_table, compare, program, rates

KERNELS = "mla_attention_sm90,mla_attention_sm90_whole,mla_attention_triton_split"
LATENT, DIM = 512, 576


@dataclass(frozen=True)
class Case:
    """The contexts, query heads, new tokens of each sequence and tokens of a page."""

    contexts: tuple[int, ...]
    heads: int
    queries: int = 1
    page: int = 64

    @property
    def flops(self) -> int:
        pairs = sum(
            self.queries * context - self.queries * (self.queries - 1) // 2 for context in self.contexts
        )
        return 2 * pairs * self.heads * (DIM + LATENT)

    @property
    def bytes(self) -> int:
        rows = len(self.contexts) * self.queries * self.heads
        return 2 * (sum(self.contexts) * DIM + rows * (DIM + LATENT))


def uniform(batch: int, heads: int, context: int, **others: int) -> Case:
    return Case((context,) * batch, heads, **others)


RAGGED = tuple(100 + 250 * i for i in range(32))
CASES = {
    "b1_h16_1k": uniform(1, 16, 1024),
    "b1_h16_4k": uniform(1, 16, 4096),
    "b1_h16_64k": uniform(1, 16, 65536),
    "b16_h16_4k": uniform(16, 16, 4096),
    "b64_h16_4k": uniform(64, 16, 4096),
    "b128_h16_1k": uniform(128, 16, 1024),
    "b128_h16_4k": uniform(128, 16, 4096),
    "b128_h16_8k": uniform(128, 16, 8192),
    "b16_h64_4k": uniform(16, 64, 4096),
    "b64_h64_4k": uniform(64, 64, 4096),
    "b128_h64_4k": uniform(128, 64, 4096),
    "b1_h128_1k": uniform(1, 128, 1024),
    "b1_h128_4k": uniform(1, 128, 4096),
    "b1_h128_64k": uniform(1, 128, 65536),
    "b16_h128_4k": uniform(16, 128, 4096),
    "b64_h128_4k": uniform(64, 128, 4096),
    "b128_h128_1k": uniform(128, 128, 1024),
    "b128_h128_4k": uniform(128, 128, 4096),
    "b128_h128_8k": uniform(128, 128, 8192),
    "ragged_h16": Case(RAGGED, 16),
    "ragged_h128": Case(RAGGED, 128),
    "b16_h16_4k_q4": uniform(16, 16, 4096, queries=4),
    "b16_h128_4k_q2": uniform(16, 128, 4096, queries=2),
    "b64_h8_4k": uniform(64, 8, 4096),
    "b64_h16_4k_page1": uniform(64, 16, 4096, page=1),
    "b64_h16_4k_page16": uniform(64, 16, 4096, page=16),
    "b128_h128_4k_page16": uniform(128, 128, 4096, page=16),
    "smallest": Case((5, 9), 2),
}


class Inputs:
    """Arguments of a case, in enough copies that each has left the cache when it is used again."""

    def __init__(self, case: Case) -> None:
        blocks = [-(-context // case.page) for context in case.contexts]
        tokens = len(blocks) * case.queries
        begin = torch.arange(0, tokens + 1, case.queries, dtype=torch.int32, device=DEVICE)
        self.contexts = torch.tensor(case.contexts, dtype=torch.int32, device=DEVICE)
        self.sets = []
        self.out = torch.empty(tokens, case.heads, LATENT, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(min(64, cold_count(sum(blocks) * case.page * DIM * 2))):
            cache = torch.randn(sum(blocks), case.page, DIM, device=DEVICE, dtype=torch.bfloat16)
            table = block_table(blocks)
            q = torch.randn(tokens, case.heads, DIM, device=DEVICE, dtype=torch.bfloat16)
            self.sets.append((q, cache, table.to(DEVICE)))
        self.rest = (begin, self.contexts, case.queries, max(case.contexts), DIM**-0.5, LATENT, None)
        self.problem = OP.problem(
            f"q_tokens={tokens},seqs={len(blocks)},max_q={case.queries},max_ctx={max(case.contexts)},"
            f"total_ctx={sum(case.contexts)},heads={case.heads},block_size={case.page}"
        )


def calls_of(inputs: Inputs, name: str, changes: dict[str, int]) -> Calls:
    """Calls of a registered kernel with its default configuration, updated by `changes`."""
    launch = Launch(default_registry().kernel(OP.name, name), inputs.problem, changes, DEVICE)
    return [launch.call(*one, *inputs.rest, launch.workspace, inputs.out) for one in inputs.sets]


def timed(name: str, kernels: list[str], sweep: Sweep | None, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a case: samples and medians in microseconds, TFLOP/s, and the ratio of each kernel to the first one."""
    case = CASES[name]
    inputs = Inputs(case)
    found = compare(kernels, sweep, partial(calls_of, inputs), inputs.out, rounds, seconds)
    return {
        "case": name,
        "problem": str(inputs.problem),
        "copies": len(inputs.sets),
        "flops": case.flops,
        "bytes": case.bytes,
        "tflops": rates(case.flops, found["us"]),
        "tbps": rates(case.bytes, found["us"], digits=2),
        **found,
    }


def add_floor(row: dict[str, Any]) -> None:
    """The time of a read of the same number of bytes."""
    row["read_floor_us"] = floor_us(row["bytes"])[0]


def main() -> int:
    return program(
        "mla_attention", __doc__, CASES, KERNELS, timed, ("us", "tflops", "tbps"), floors=add_floor
    )


if __name__ == "__main__":
    raise SystemExit(main())
