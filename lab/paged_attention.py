"""Paged attention of given lengths on one GPU: registered kernels, torch's cuDNN attention, which has no pages, and FlashAttention-2 where vLLM
is installed with it, side by side.

    python -m lab.paged_attention --out result.json
    python -m lab.paged_attention --cases prefill_2k,mixed_2k_31 --set reading=2,4,8

CUDA graphs over caches that rotate through four times the L2, replayed in turn; block tables are shuffled, queries random.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.paged_attention.op import OP
from lab.flash_attention_2 import FLASH_ATTENTION_2, PAGE, flash_attention_2_call, flash_attention_2_is_here
from lab.gpu_graphs import DEVICE, cold_count
from lab.kernel_timing import Calls, Launch, Sweep, block_table, compare, program, rates

KERNELS = "paged_attention_sm90,paged_attention_triton_split"


@dataclass(frozen=True)
class Case:
    """New tokens and contexts of each sequence; (query heads, KV heads, elements of a head); a page's tokens; the window; the axis
    kv_scale, where the caches hold e4m3 codes; the soft cap of the scores."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[int, int, int] = (32, 8, 128)
    page: int = 16
    window: int = 0
    kv_scale: str = "none"
    softcap: float = 0.0

    @property
    def flops(self) -> int:
        pairs = 0
        for queries, context in zip(self.queries, self.contexts, strict=True):
            seen = range(context - queries + 1, context + 1)
            pairs += sum(min(keys, self.window or keys) for keys in seen)
        return 4 * pairs * self.heads[0] * self.heads[2]


def prefill(*lengths: int, **others: Any) -> Case:
    return Case(lengths, lengths, **others)


MANY = (
    *(
        (count, context, (16, 8, 128))
        for count in (64, 128, 256, 512, 1024)
        for context in (16, 100, 300, 1024)
    ),
    *(
        (count, context, (32, 8, 128))
        for count, context in ((256, 300), (64, 1024), (128, 4096), (1024, 100))
    ),
)
"""Sequences, their context and the heads of decodes of many sequences."""

CONTEXTS = {24: 4096, 48: 4096, 64: 4096, 128: 2048, 200: 1024}
"""Sequences and their mean context, of decodes whose contexts are equal, evenly spread, or spread by powers of two."""


def spread(count: int, mean: int, kind: str) -> tuple[int, ...]:
    """Contexts of `count` sequences: all `mean`; in even steps from 10 to twice that; or each by the same factor longer than the
    one before, from 10 to three times that."""
    if kind == "equal":
        return (mean,) * count
    places = [i / (count - 1) for i in range(count)]
    if kind == "even":
        return tuple(int(10 + (2 * mean - 10) * place) for place in places)
    return tuple(int(10 * (3 * mean / 10) ** place) for place in places)


CASES = {
    "prefill_512": prefill(512),
    "prefill_2k": prefill(2048),
    "prefill_8k": prefill(8192),
    "prefill_2k_page64": prefill(2048, page=64),
    "prefill_8k_page128": prefill(8192, page=128),
    "prefill_2k_page1": prefill(2048, page=1),
    "prefill_4x2k_64h": prefill(*(2048,) * 4, heads=(64, 8, 128)),
    "prefill_8x2k": prefill(*(2048,) * 8),
    "prefill_1k_mha": prefill(1024, heads=(32, 32, 128)),
    "prefill_ragged_16": prefill(*(64 + 120 * i for i in range(16))),
    "prefill_2k_d64": prefill(2048, heads=(64, 8, 64)),
    "prefill_8k_d64": prefill(8192, heads=(64, 8, 64)),
    "prefill_8k_d64_window128": prefill(8192, heads=(64, 8, 64), window=128),
    "chunk_2k_at_16k": Case((2048,), (16384,)),
    "chunk_512_at_4k": Case((512,), (4096,)),
    "mixed_2k_31": Case((2048, *(1,) * 31), (2048, *(3000,) * 31)),
    "mixed_512_63": Case((512, *(1,) * 63), (2048,) * 64),
    "mixed_1k_15_at_8k": Case((1024, *(1,) * 15), (1024, *(8000,) * 15)),
    "mixed_2k_128": Case((2048, *(1,) * 128), (2048,) * 129),
    "mixed_4x512_8": Case((*(512,) * 4, *(1,) * 8), (*(4096,) * 4, *(4000,) * 8)),
    "verify_q4_b16_4k": Case((4,) * 16, (4096,) * 16),
    "decode_b1_1k": Case((1,), (1024,)),
    "decode_b1_4k": Case((1,), (4096,)),
    "decode_b1_16k": Case((1,), (16384,)),
    "decode_b1_32k": Case((1,), (32768,)),
    **{
        f"decode_b{count}_{context // 1024}k_4kv": Case((1,) * count, (context,) * count, heads=(32, 4, 128))
        for count in (1, 2, 4)
        for context in (1024, 4096, 16384)
    },
    "decode_b16_1k": Case((1,) * 16, (1024,) * 16),
    "decode_b64_4k": Case((1,) * 64, (4096,) * 64),
    "decode_b256_1k": Case((1,) * 256, (1024,) * 256),
    "decode_b32_ragged": Case((1,) * 32, tuple(100 + 250 * i for i in range(32)), heads=(64, 8, 128)),
    **{
        f"decode_b{count}_{context}_{heads[0]}h": Case((1,) * count, (context,) * count, heads=heads)
        for count, context, heads in MANY
    },
    **{
        f"decode_{count}_{kind}_{kv_heads}kv": Case(
            (1,) * count, spread(count, mean, kind), heads=(4 * kv_heads, kv_heads, 128)
        )
        for kv_heads in (4, 8, 16)
        for count, mean in CONTEXTS.items()
        for kind in ("equal", "even", "log")
    },
    **{
        f"decode_64_{kind}_4kv_16_rows": Case((1,) * 64, spread(64, 4096, kind), heads=(64, 4, 128))
        for kind in ("equal", "even", "log")
    },
    "verify_q4_b16_log": Case((4,) * 16, spread(16, 4096, "log")),
    "decode_b256_ragged": Case(
        (1,) * 256, tuple(20 + 980 * i // 255 for i in range(256)), heads=(16, 8, 128)
    ),
    "decode_b512_300_one_head": Case((1,) * 512, (300,) * 512, heads=(4, 1, 128)),
    "decode_b128_1k_d64": Case((1,) * 128, (1024,) * 128, heads=(64, 8, 64)),
    "decode_b64_2k_d256": Case((1,) * 64, (2048,) * 64, heads=(16, 8, 256)),
    "decode_b1_1k_fp8": Case((1,), (1024,), kv_scale="head"),
    "decode_b1_4k_fp8": Case((1,), (4096,), kv_scale="head"),
    "decode_b1_32k_fp8": Case((1,), (32768,), kv_scale="head"),
    "decode_b1_32k_fp8_token": Case((1,), (32768,), kv_scale="token"),
    "decode_b8_4k_fp8": Case((1,) * 8, (4096,) * 8, kv_scale="head"),
    "decode_b8_32k_fp8": Case((1,) * 8, (32768,) * 8, kv_scale="head"),
    "decode_b64_4k_fp8": Case((1,) * 64, (4096,) * 64, kv_scale="head"),
    "decode_b128_2k_fp8": Case((1,) * 128, (2048,) * 128, heads=(64, 8, 128), kv_scale="head"),
    "decode_b128_2k_fp8_token": Case((1,) * 128, (2048,) * 128, heads=(64, 8, 128), kv_scale="token"),
    "decode_b16_4k_16_rows_fp8": Case((1,) * 16, (4096,) * 16, heads=(64, 4, 128), kv_scale="head"),
    "prefill_2k_fp8_token": prefill(2048, kv_scale="token"),
    "prefill_2k_d96": prefill(2048, heads=(32, 32, 96)),
    "decode_b1_4k_d96": Case((1,), (4096,), heads=(32, 8, 96)),
    "decode_b1_4k_d256": Case((1,), (4096,), heads=(16, 8, 256)),
    "decode_b16_4k_d256": Case((1,) * 16, (4096,) * 16, heads=(16, 8, 256)),
    "prefill_2k_d256": prefill(2048, heads=(16, 8, 256)),
    "prefill_8k_d256": prefill(8192, heads=(16, 8, 256)),
    "prefill_2k_d192": prefill(2048, heads=(32, 8, 192)),
    "chunk_2k_at_16k_d256": Case((2048,), (16384,), heads=(16, 8, 256)),
    "mixed_2k_31_d256": Case((2048, *(1,) * 31), (2048, *(3000,) * 31), heads=(16, 8, 256)),
    "prefill_2k_d256_softcap": prefill(2048, heads=(16, 8, 256), softcap=50.0),
    "prefill_2k_fp8": prefill(2048, kv_scale="head"),
    "prefill_8k_fp8": prefill(8192, kv_scale="head"),
    "chunk_2k_at_16k_fp8": Case((2048,), (16384,), kv_scale="head"),
    "mixed_2k_31_fp8": Case((2048, *(1,) * 31), (2048, *(3000,) * 31), kv_scale="head"),
    "prefill_2k_softcap": prefill(2048, softcap=50.0),
    "prefill_8k_softcap": prefill(8192, softcap=50.0),
    "prefill_2k_fp8_softcap": prefill(2048, kv_scale="head", softcap=50.0),
    "mixed_2k_31_softcap": Case((2048, *(1,) * 31), (2048, *(3000,) * 31), softcap=50.0),
    "decode_b1_1k_softcap": Case((1,), (1024,), softcap=50.0),
    "decode_b1_32k_softcap": Case((1,), (32768,), softcap=50.0),
    "decode_b16_1k_softcap": Case((1,) * 16, (1024,) * 16, softcap=50.0),
    "decode_b1_32k_fp8_softcap": Case((1,), (32768,), kv_scale="head", softcap=50.0),
    "decode_b16_4k_d256_softcap": Case((1,) * 16, (4096,) * 16, heads=(16, 8, 256), softcap=50.0),
    "smallest": Case((3, 1), (5, 9), heads=(2, 1, 64)),
}


class Inputs:
    """Arguments of a case, in enough copies that each has left the cache when it is used again."""

    def __init__(self, case: Case) -> None:
        heads, kv_heads, dim = case.heads
        blocks = [-(-context // case.page) for context in case.contexts]
        codes = case.kv_scale != "none"
        size = 2 * sum(blocks) * case.page * kv_heads * dim * (1 if codes else 2)
        ends = torch.tensor([0, *case.queries]).cumsum(0)
        self.begin = ends.to(DEVICE, torch.int32)
        self.contexts = torch.tensor(case.contexts, dtype=torch.int32, device=DEVICE)
        self.sets, self.out = [], torch.empty(int(ends[-1]), heads, dim, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(min(64, cold_count(size))):
            caches = torch.randn(
                2, sum(blocks), case.page, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16
            )
            scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
            if codes:
                shape = caches.shape[1:4] if case.kv_scale == "token" else (1, 1, kv_heads)
                scales = (torch.rand(shape, device=DEVICE) + 0.5, torch.rand(shape, device=DEVICE) + 0.5)
                caches = caches.to(torch.float8_e4m3fn)
            table = block_table(blocks)
            self.sets.append(((torch.randn_like(self.out), caches[0], caches[1], table.to(DEVICE)), scales))
        self.rest = (
            self.begin,
            self.contexts,
            max(case.queries),
            max(case.contexts),
            dim**-0.5,
            case.window,
            None,
            None,
        )
        self.softcap = case.softcap
        self.problem = OP.problem(
            f"q_tokens={int(ends[-1])},seqs={len(blocks)},max_q={max(case.queries)},max_ctx={max(case.contexts)},"
            f"total_ctx={sum(case.contexts)},heads={heads},kv_heads={kv_heads},head_dim={dim},block_size={case.page},"
            f"window={case.window},kv={'fp8' if codes else 'x'},kv_scale={case.kv_scale},softcap={str(case.softcap > 0).lower()}"
        )


def calls_of(inputs: Inputs, name: str, changes: dict[str, int]) -> Calls:
    """Calls of a registered kernel with its default configuration, updated by `changes`."""
    launch = Launch(default_registry().kernel(OP.name, name), inputs.problem, changes, DEVICE)
    return [
        launch.call(*arguments, *inputs.rest, launch.workspace, *scales, inputs.softcap, inputs.out)
        for arguments, scales in inputs.sets
    ]


def cudnn_calls(case: Case) -> Calls | None:
    """torch's cuDNN attention over contiguous tensors, for sequences of equal length without cached tokens."""
    if (
        len(set(case.queries)) > 1
        or case.queries != case.contexts
        or case.window
        or DEVICE == "cpu"
        or case.kv_scale != "none"
        or case.softcap
    ):
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    heads, kv_heads, dim = case.heads

    def made(count: int) -> torch.Tensor:
        shape = (len(case.queries), count, case.queries[0], dim)
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    count = min(16, cold_count(4 * kv_heads * dim * sum(case.contexts)))
    sets = [(made(heads), made(kv_heads), made(kv_heads)) for _ in range(count)]
    return [partial(call, *arguments) for arguments in sets]


def flash_attention_2_calls(case: Case, inputs: Inputs) -> Calls | None:
    """Calls of FlashAttention-2 with the same tensors, if it takes them."""
    if case.kv_scale != "none" or case.page % PAGE or not flash_attention_2_is_here():
        return None
    longest, scale = (max(case.queries), max(case.contexts)), case.heads[2] ** -0.5
    call = flash_attention_2_call(
        inputs.begin, inputs.contexts, longest, scale, case.window, case.softcap, inputs.out
    )
    return [partial(call, *arguments) for arguments, _ in inputs.sets]


def timed(name: str, kernels: list[str], sweep: Sweep | None, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a case: samples and medians in microseconds, TFLOP/s, and the ratio of each kernel to the first one."""
    case = CASES[name]
    inputs = Inputs(case)
    found_peers = {
        "cudnn_contiguous": cudnn_calls(case),
        FLASH_ATTENTION_2: flash_attention_2_calls(case, inputs),
    }
    peers = {peer: calls for peer, calls in found_peers.items() if calls is not None}
    found = compare(kernels, sweep, partial(calls_of, inputs), inputs.out, rounds, seconds, peers)
    return {
        "case": name,
        "problem": str(inputs.problem),
        "copies": len(inputs.sets),
        "flops": case.flops,
        "tflops": rates(case.flops, found["us"]),
        **found,
    }


def main() -> int:
    return program("paged_attention", __doc__, CASES, KERNELS, timed, ("us", "tflops"))


if __name__ == "__main__":
    raise SystemExit(main())
