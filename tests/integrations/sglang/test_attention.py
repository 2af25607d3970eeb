"""The attention backend over SGLang's real pools and layers: chunks behind a cached prefix, windows, sinks, pages of 1 and 16 slots."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from gristmill.autotune.resolve import Resolver
from gristmill.integrations.sglang.attention import GristmillAttention, _refuse_layer
from gristmill.runtime.errors import UsageError

HEADS, KV_HEADS, D = 4, 2, 64
LENGTHS, NEW = [20, 33, 1], [5, 33, 1]


@pytest.fixture(autouse=True)
def _selection_without_verification(policy_file: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    policy_file()
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)


def backend_of(page: int, window: int) -> tuple[GristmillAttention, Any, list[Tensor]]:
    """The backend of a model with one layer, and the slots of each request: pages in any order, unowned slots NaN."""
    pool = MHATokenToKVPool(
        size=160,
        page_size=page,
        dtype=torch.float32,
        head_num=KV_HEADS,
        head_dim=D,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(torch.nan)
    requests = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    layer = RadixAttention(HEADS, D, D**-0.5, KV_HEADS, 0, sliding_window_size=window)
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=requests,
        dtype=torch.float32,
        server_args=SimpleNamespace(max_prefill_tokens=64),
        model=torch.nn.ModuleList([layer]),
    )
    pages = torch.randperm(160 // page) + 1
    slots: list[Tensor] = []
    for row, length in enumerate(LENGTHS):
        count = -(-length // page)
        own, pages = pages[:count], pages[count:]
        slots.append((own[:, None] * page + torch.arange(page)).flatten()[:length])
        requests.write((row + 1, slice(0, length)), slots[-1].to(torch.int32))
    return GristmillAttention(runner), layer, slots


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("window", [-1, 6])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])])
def test_chunks_and_decodes(page: int, window: int, sinks: Tensor | None) -> None:
    torch.manual_seed(3)
    backend, layer, slots = backend_of(page, window)
    keys, values = ([torch.randn(n, KV_HEADS, D) for n in LENGTHS] for _ in range(2))
    pool = backend.token_to_kv_pool
    for k, v, where, new in zip(keys, values, slots, NEW, strict=True):
        pool.k_buffer[0][where[:-new]], pool.v_buffer[0][where[:-new]] = k[:-new], v[:-new]
    decode = [n + 1 for n in LENGTHS]
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        counts = NEW if mode.is_extend() else [1] * 3
        if mode.is_decode():  # one token more of each request, in the slot behind its last
            free = iter(sorted(set(range(1, 160)) - {int(slot) for own in slots for slot in own}))
            for row in range(3):
                last = slots[row]
                following = int(last[-1]) + 1 if len(last) % page else page * (next(free) // page)
                while len(last) % page == 0 and any(following in own.tolist() for own in slots):
                    following = page * (next(free) // page)
                slots[row] = torch.cat([last, torch.tensor([following])])
                backend.req_to_token[row + 1, len(last)] = following
            keys = [torch.cat([k, torch.randn(1, KV_HEADS, D)]) for k in keys]
            values = [torch.cat([v, torch.randn(1, KV_HEADS, D)]) for v in values]
        lengths = LENGTHS if mode.is_extend() else decode
        batch = SimpleNamespace(
            forward_mode=mode,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens=torch.tensor(counts),
            extend_seq_lens_cpu=counts,
            req_pool_indices=torch.tensor([1, 2, 3]),
            out_cache_loc=torch.cat([own[-n:] for own, n in zip(slots, counts, strict=True)]),
        )
        backend.init_forward_metadata(batch)
        new = [torch.cat([x[-n:] for x, n in zip(both, counts, strict=True)]) for both in (keys, values)]
        q = torch.randn(sum(counts), HEADS * D)
        named = {} if sinks is None else {"sinks": sinks}
        out = backend.forward(q, *new, layer, batch, **named).view(-1, HEADS, D)
        rows = iter(range(sum(counts)))
        for k, v, count in zip(keys, values, counts, strict=True):
            for position in range(len(k) - count, len(k)):
                row = next(rows)
                seen = slice(max(0, position - window) if window > -1 else 0, position + 1)
                for head in range(HEADS):
                    scores = (k[seen, head // 2] @ q[row].view(HEADS, D)[head]) * D**-0.5
                    sink = torch.empty(0) if sinks is None else sinks[head : head + 1]
                    weights = torch.softmax(torch.cat([scores, sink]), 0)[: len(scores)]
                    expected = weights @ v[seen, head // 2]
                    torch.testing.assert_close(out[row, head], expected, atol=1e-5, rtol=1e-4)


def test_an_idle_batch_and_a_call_without_metadata() -> None:
    backend, layer, _ = backend_of(16, -1)
    empty = torch.empty(0, HEADS * D)
    with pytest.raises(RuntimeError, match="before init_forward_metadata"):
        backend.forward_extend(empty, None, None, layer, None)
    none = torch.empty(0, dtype=torch.int64)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.IDLE, seq_lens=none, seq_lens_cpu=none, req_pool_indices=none
    )
    backend.init_forward_metadata(batch)
    assert backend.forward(empty, None, None, layer, batch).shape == (0, HEADS * D)


def test_an_encoder_is_refused_by_name() -> None:
    layer = RadixAttention(HEADS, D, 1.0, KV_HEADS, 5, attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(UsageError, match=r"attention of type encoder_only \(layer 5\)"):
        _refuse_layer(layer)
