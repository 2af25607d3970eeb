"""Prefill of multi-head latent attention on one GPU: un-absorbed attention by registered kernels, and both forms of a whole layer's
attention, next to the floor of matrix products.

    python -m lab.varlen_attention --out result.json
    python -m lab.varlen_attention --cases 8k_h128,chunk_512_at_8k_h16 --kernels varlen_attention_sm90

CUDA graphs over inputs that rotate through four times the L2, replayed in turn. Beside the kernels: torch's cuDNN attention, the absorbed
kernel alone (`absorbed_attention`), and the two forms with the products that they need, from rotated queries and cached latents to the
values of the heads. The expanded forms gather the latents of cached tokens and multiply them to keys and values: by a product per head
(`expanded_form`), or by one for all heads (`expanded_form_at_once`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.mla_attention import op as mla_attention
from gristmill.kernels.attention.varlen_attention.op import OP
from lab.gpu_graphs import DEVICE, cold_count
from lab.kernel_timing import Calls, Launch, Sweep, block_table, compare, program, rates

KERNELS = "varlen_attention_sm90,varlen_attention_triton"
MATRIX_TFLOPS = 785.0
"""What an 8192^3 bf16 product reaches on an H200."""
NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
KEY, PAGE = NOPE + ROPE, 64


@dataclass(frozen=True)
class Case:
    """New tokens and contexts of the sequences, and heads."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int

    @property
    def flops(self) -> int:
        pairs = sum(
            q * context - q * (q - 1) // 2 for q, context in zip(self.queries, self.contexts, strict=True)
        )
        return 2 * pairs * self.heads * (KEY + VALUE)


def fresh(lengths: tuple[int, ...], heads: int) -> Case:
    return Case(lengths, lengths, heads)


RAGGED = tuple(64 + 120 * i for i in range(16))
CASES = {
    "2k_h16": fresh((2048,), 16),
    "2k_h128": fresh((2048,), 128),
    "4x2k_h16": fresh((2048,) * 4, 16),
    "4x2k_h128": fresh((2048,) * 4, 128),
    "8k_h16": fresh((8192,), 16),
    "8k_h128": fresh((8192,), 128),
    "3k_h16": fresh((3000,), 16),
    "512_h128": fresh((512,), 128),
    "ragged_h16": fresh(RAGGED, 16),
    "ragged_h128": fresh(RAGGED, 128),
    "chunk_2k_at_16k_h16": Case((2048,), (16384,), 16),
    "chunk_2k_at_16k_h128": Case((2048,), (16384,), 128),
    "chunk_512_at_8k_h16": Case((512,), (8192,), 16),
    "chunk_512_at_8k_h128": Case((512,), (8192,), 128),
    "chunk_256_at_8k_h16": Case((256,), (8192,), 16),
    "chunk_256_at_8k_h128": Case((256,), (8192,), 128),
    "chunk_128_at_8k_h16": Case((128,), (8192,), 16),
    "chunk_128_at_8k_h128": Case((128,), (8192,), 128),
    "64_h16": fresh((64,), 16),
    "64_h128": fresh((64,), 128),
    "chunk_256_at_32k_h16": Case((256,), (32768,), 16),
    "chunk_512_at_64k_h16": Case((512,), (65536,), 16),
    "chunk_1k_at_64k_h16": Case((1024,), (65536,), 16),
    "smallest": Case((5, 9), (7, 9), 2),
}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def starts(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)


class Inputs:
    """Arguments of a case, in enough copies that each has left the cache when it is used again."""

    def __init__(self, case: Case) -> None:
        self.case = case
        tokens, rows = sum(case.queries), sum(case.contexts)
        size = (tokens * KEY + rows * (KEY + VALUE)) * case.heads * 2
        self.sets = []
        for _ in range(min(16, cold_count(size))):
            kv = randn(rows, case.heads, KEY + VALUE)
            self.sets.append((randn(tokens, case.heads, KEY), kv[..., :KEY], kv[..., KEY:]))
        self.begin, self.rows = starts(case.queries), starts(case.contexts)
        self.bounds = (max(case.queries), max(case.contexts), KEY**-0.5, None, -1, 0)
        self.out = torch.empty(tokens, case.heads, VALUE, dtype=torch.bfloat16, device=DEVICE)
        axes = f"q_tokens={tokens},seqs={len(case.queries)},max_q={self.bounds[0]},max_ctx={self.bounds[1]}"
        self.axes = f"{axes},total_ctx={rows},heads={case.heads}"
        self.problem = OP.problem(f"{self.axes},kv_heads={case.heads}")


def calls_of(inputs: Inputs, name: str, changes: dict[str, int]) -> Calls:
    """Calls of a registered kernel with its default configuration, updated by `changes`. ValueError if it refuses the problem."""
    launch = Launch(default_registry().kernel(OP.name, name), inputs.problem, changes, DEVICE)
    lengths = (inputs.begin, inputs.rows, *inputs.bounds)
    return [launch.call(*arguments, *lengths, inputs.out) for arguments in inputs.sets]


def cudnn_calls(inputs: Inputs) -> Calls | None:
    """torch's cuDNN attention, for sequences of equal length without cached tokens; None where it refuses."""
    case = inputs.case
    if len(set(case.queries)) > 1 or case.queries != case.contexts or DEVICE == "cpu":
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    shape = (len(case.queries), case.heads, case.queries[0])
    sets = [(randn(*shape, KEY), randn(*shape, KEY), randn(*shape, VALUE)) for _ in inputs.sets]
    try:
        call(*sets[0])
    except RuntimeError as refused:
        print("cuDNN:", str(refused).splitlines()[0], flush=True)
        return None
    return [partial(call, *arguments) for arguments in sets]


class Layer:
    """Both forms of the attention of a layer, over a paged cache of latents."""

    def __init__(self, inputs: Inputs, expanded: str) -> None:
        case = self.case = inputs.case
        self.inputs, registry = inputs, default_registry()
        heads, tokens = case.heads, sum(case.queries)
        blocks = [-(-context // PAGE) for context in case.contexts]
        table = block_table(blocks)
        slots = [
            row[torch.arange(n) // PAGE].long() * PAGE + torch.arange(n) % PAGE
            for row, n in zip(table, case.contexts, strict=True)
        ]
        self.slots, self.table = torch.cat(slots).to(DEVICE), table.to(DEVICE)
        self.lengths = torch.tensor(case.contexts, dtype=torch.int32, device=DEVICE)
        self.caches = [randn(sum(blocks), PAGE, LATENT + ROPE) for _ in inputs.sets]
        self.kv_weight = randn(LATENT, heads * (NOPE + VALUE)) * LATENT**-0.5
        per_head = self.kv_weight.view(LATENT, heads, NOPE + VALUE)
        self.to_latent = per_head[..., :NOPE].permute(1, 2, 0).contiguous()
        self.to_values = per_head[..., NOPE:].permute(1, 0, 2).contiguous()
        self.query = torch.empty(tokens, heads, LATENT + ROPE, dtype=torch.bfloat16, device=DEVICE)
        self.sums = torch.empty(tokens, heads, LATENT, dtype=torch.bfloat16, device=DEVICE)
        problem = mla_attention.OP.problem(inputs.axes)
        absorbed = "mla_attention_torch" if DEVICE == "cpu" else "mla_attention_sm90"
        self.absorbed_launch = Launch(registry.kernel("mla_attention", absorbed), problem, {}, DEVICE)
        self.launch = Launch(registry.kernel(OP.name, expanded), inputs.problem, {}, DEVICE)

    def absorbed_attention(self, cache: torch.Tensor) -> None:
        max_q, max_ctx, scale, *_ = self.inputs.bounds
        lengths = (self.table, self.inputs.begin, self.lengths, max_q, max_ctx)
        workspace = self.absorbed_launch.workspace
        self.absorbed_launch.call(self.query, cache, *lengths, scale, LATENT, None, workspace, self.sums)()

    def absorbed(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        self.query[..., :LATENT] = torch.bmm(q[..., :NOPE].transpose(0, 1), self.to_latent).transpose(0, 1)
        self.query[..., LATENT:] = q[..., NOPE:]
        self.absorbed_attention(cache)
        return torch.bmm(self.sums.transpose(0, 1), self.to_values).transpose(0, 1).contiguous()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs
        self.launch.call(q, k, v, inputs.begin, inputs.rows, *inputs.bounds, inputs.out)()
        return inputs.out

    def expanded(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Keys and values by a product per head, to where they are read."""
        context, heads = cache.view(-1, LATENT + ROPE)[self.slots], self.case.heads
        latents = context[:, :LATENT].expand(heads, -1, -1)
        k, v = q.new_empty(len(context), heads, KEY), q.new_empty(len(context), heads, VALUE)
        k[..., NOPE:] = context[:, None, LATENT:]
        torch.bmm(latents, self.to_latent.transpose(1, 2), out=k[..., :NOPE].transpose(0, 1))
        torch.bmm(latents, self.to_values, out=v.transpose(0, 1))
        return self.attend(q, k, v)

    def expanded_at_once(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Keys and values by one product, from which the keys are copied."""
        context = cache.view(-1, LATENT + ROPE)[self.slots]
        kv = (context[:, :LATENT] @ self.kv_weight).view(len(context), self.case.heads, NOPE + VALUE)
        k = q.new_empty(len(context), self.case.heads, KEY)
        k[..., :NOPE] = kv[..., :NOPE]
        k[..., NOPE:] = context[:, None, LATENT:]
        return self.attend(q, k, kv[..., NOPE:])

    def calls(self) -> dict[str, Calls]:
        """By name, over every copy of the inputs; ValueError if the two forms disagree."""
        q, cache = self.inputs.sets[0][0], self.caches[0]
        one = self.absorbed(q, cache).float()
        for form in (self.expanded, self.expanded_at_once):
            other = form(q, cache).float()
            difference = float((one - other).norm() / other.norm())
            if not difference < 0.03:
                raise ValueError(f"{form.__name__} differs from the absorbed form by {difference:.3g}")
        pairs = [
            (arguments[0], cache) for arguments, cache in zip(self.inputs.sets, self.caches, strict=True)
        ]
        return {
            "absorbed_attention": [partial(self.absorbed_attention, cache) for _, cache in pairs],
            "absorbed_form": [partial(self.absorbed, *pair) for pair in pairs],
            "expanded_form": [partial(self.expanded, *pair) for pair in pairs],
            "expanded_form_at_once": [partial(self.expanded_at_once, *pair) for pair in pairs],
        }


def timed(name: str, kernels: list[str], sweep: Sweep | None, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a case: samples and medians in microseconds, TFLOP/s of un-absorbed attention, and the difference of the kernels."""
    case = CASES[name]
    inputs = Inputs(case)
    peers = Layer(inputs, kernels[0]).calls()
    cudnn = cudnn_calls(inputs)
    peers |= {} if cudnn is None else {"cudnn": cudnn}
    found = compare(kernels, sweep, partial(calls_of, inputs), inputs.out, rounds, seconds, peers)
    attention = {
        label: us for label, us in found["us"].items() if not {"absorbed", "form"} & {*label.split("_")}
    }
    return {
        "case": name,
        "problem": str(inputs.problem),
        "copies": len(inputs.sets),
        "flops": case.flops,
        "floor_us": round(case.flops / MATRIX_TFLOPS / 1e6, 2),
        "tflops": rates(case.flops, attention),
        **found,
    }


def main() -> int:
    return program("varlen_attention", __doc__, CASES, KERNELS, timed, ("us", "tflops", "difference"))


if __name__ == "__main__":
    raise SystemExit(main())
