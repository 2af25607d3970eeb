"""vLLM's attention layers on our kernels, over vLLM's paged cache. On a CPU vLLM has one backend, so the test stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from gristmill.autotune.captures import capturing
from gristmill.autotune.resolve import Resolver
from gristmill.integrations.vllm import register
from gristmill.integrations.vllm.attention import (
    GristmillAttention,
    GristmillAttentionBackend,
    MetadataBuilder,
)
from gristmill.integrations.vllm.decode_buffers import DecodeBuffers
from tests.integrations.vllm.test_quantization import PARAMS, of_vllm, runtime
from tests.integrations.vllm.test_worker import generated, prompts, texts

PATH = "gristmill.integrations.vllm.attention.GristmillAttentionBackend"


@pytest.fixture
def in_place_of_vllms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    register_backend(AttentionBackendEnum.CPU_ATTN, PATH)
    selector._cached_get_attn_backend.cache_clear()
    yield
    selector._cached_get_attn_backend.cache_clear()


def test_the_backend_is_registered_under_the_name_for_plugins() -> None:
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is GristmillAttentionBackend


def test_another_plugins_backend_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"
    assert "CUSTOM is other.Backend, registered by another plugin; it stays" in caplog.text


@pytest.mark.usefixtures("in_place_of_vllms")
@pytest.mark.parametrize("quant", [None, "int4_g128"])
def test_the_ids_are_those_of_the_runtime(
    host: Callable[..., Any], quant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"quantization": None}
    if quant is not None:
        options = {"additional_config": {"gristmill": {"quant": quant}}}
    calls: list[str] = []
    for name in ("forward", "do_kv_cache_update"):
        method = getattr(GristmillAttention, name)

        def counted(self: Any, *rest: Any, _name: str = name, _method: Any = method, **named: Any) -> Any:
            calls.append(_name)
            return _method(self, *rest, **named)

        monkeypatch.setattr(GristmillAttention, name, counted)
    llm, ids = (
        of_vllm(host, "docs-llama", **options),
        texts(5),
    )  # a prompt of several chunks, and a cached prefix
    expected = runtime("docs-llama", ids, quant=quant)
    for _ in range(2):
        assert generated(llm.generate(prompts(ids), PARAMS)) == expected
    assert calls.count("forward") == calls.count("do_kv_cache_update") > 6 * 16

    views = GristmillAttention._views
    monkeypatch.setattr(GristmillAttention, "_views", lambda self, cache: views(self, cache)[::-1])
    assert generated(llm.generate(prompts(ids), PARAMS)) != expected


@pytest.mark.parametrize("version", ["0.24", "0.32"])
def test_the_cache_of_each_version(
    version: str, policy_file: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk, a decode and padding over a cache of vLLM's shape, with vLLM's own metadata, against attention written out."""
    policy_file()
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)
    heads, kv_heads, d, size, blocks = 4, 2, 64, 16, 9
    layer = GristmillAttention(heads, d, d**-0.5, kv_heads)
    layer.prepare(size, torch.float32, torch.device("cpu"), [8])
    if version == "0.24":
        shape = GristmillAttentionBackend.get_kv_cache_shape(blocks, size, kv_heads, d)
        order = GristmillAttentionBackend.get_kv_cache_stride_order()
        assert sorted(order) == [*range(len(shape))]
        cache = torch.full([shape[i] for i in order], torch.nan).permute([order.index(i) for i in range(5)])
    else:
        cache = torch.full((blocks, size, kv_heads, 2 * d), torch.nan).transpose(1, 2)
    lengths, new = [20, 33], [5, 1]
    table = torch.tensor([[7, 2, 0], [4, 8, 1]], dtype=torch.int32)
    keys, values = ([torch.randn(n, kv_heads, d) for n in lengths] for _ in range(2))
    slots = [
        [int(table[row, position // size]) * size + position % size for position in range(length)]
        for row, length in enumerate(lengths)
    ]
    every = torch.tensor([*slots[0], *slots[1], -1])
    padded = [torch.cat([*both, torch.zeros(1, kv_heads, d)]) for both in (keys, values)]
    layer.do_kv_cache_update(None, *padded, cache, every)
    common = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 5, 6], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 5, 6], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=6,
        max_query_len=5,
        max_seq_len=33,
        block_table_tensor=table,
        slot_mapping=torch.tensor([*slots[0][-5:], slots[1][-1]]),
        causal=True,
    )
    metadata = MetadataBuilder.build(object.__new__(MetadataBuilder), 0, common)
    query, output = torch.randn(8, heads, d), torch.full((8, heads, d), 7.0)
    layer.forward(None, query, padded[0], padded[1], cache, metadata, output)
    rows = iter(range(6))
    for k, v, count in zip(keys, values, new, strict=True):
        for position in range(len(k) - count, len(k)):
            row, seen = next(rows), slice(0, position + 1)
            for head in range(heads):
                scores = (k[seen, head // 2] @ query[row, head]) * d**-0.5
                expected = torch.softmax(scores, 0) @ v[seen, head // 2]
                torch.testing.assert_close(output[row, head], expected, atol=1e-5, rtol=1e-4)
    assert (output[6:] == 7.0).all()  # padding is left alone
    assert (layer.forward(None, query, padded[0], padded[1], cache, None, output) == 0).all()


class Decoding:
    """One layer over a cache of random numbers, and steps of vLLM's persistent buffers in which each request has one new token."""

    heads, kv_heads, d, size, blocks, longest = 4, 2, 64, 16, 9, 48

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.layer = GristmillAttention(self.heads, self.d, self.d**-0.5, self.kv_heads)
        self.layer.prepare(self.size, dtype, self.device, [4])
        shape = (self.blocks, self.size, self.kv_heads, 2 * self.d)
        self.cache = torch.randn(shape, device=device, dtype=dtype).transpose(1, 2)
        self.query = torch.randn(4, self.heads, self.d, device=device, dtype=dtype)
        self.output = torch.zeros_like(self.query)
        self.query_start = torch.zeros(5, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(4, dtype=torch.int32, device=device)
        self.table = torch.zeros(4, 3, dtype=torch.int32, device=device)
        self.builder = object.__new__(MetadataBuilder)
        limits = SimpleNamespace(max_num_seqs=4)
        config = SimpleNamespace(max_cudagraph_capture_size=None)
        self.builder.buffers = DecodeBuffers(
            SimpleNamespace(scheduler_config=limits, compilation_config=config), self.device
        )
        self.builder.max_ctx = self.longest

    def step(self, lengths: list[int], table: list[list[int]]) -> CommonAttentionMetadata:
        """vLLM writes a step into its buffers, padded to 4 requests without a token."""
        count = len(lengths)
        self.query_start.copy_(torch.tensor([min(i, count) for i in range(5)], dtype=torch.int32))
        self.seq_lens.zero_()[:count].copy_(torch.tensor(lengths, dtype=torch.int32))
        self.table.zero_()[:count].copy_(torch.tensor(table, dtype=torch.int32))
        return CommonAttentionMetadata(
            query_start_loc=self.query_start,
            query_start_loc_cpu=self.query_start.cpu(),
            seq_lens=self.seq_lens,
            num_reqs=4,
            num_actual_tokens=4,
            max_query_len=1,
            max_seq_len=max([1, *lengths]),
            block_table_tensor=self.table,
            slot_mapping=torch.full((4,), -1, device=self.device),
            causal=True,
        )

    def compute(self, metadata: Any) -> None:
        self.layer.forward(None, self.query, self.query, self.query, self.cache, metadata, self.output)

    def expected(self, row: int, length: int, table: list[int]) -> torch.Tensor:
        """Attention written out."""
        cache, query = self.cache.transpose(1, 2).float().cpu(), self.query.float().cpu()
        kept = cache[table].reshape(-1, self.kv_heads, 2 * self.d)[:length]
        rows = []
        for head in range(self.heads):
            k, v = kept[:, head // 2, : self.d], kept[:, head // 2, self.d :]
            rows.append(torch.softmax(k @ query[row, head] * self.d**-0.5, 0) @ v)
        return torch.stack(rows)


STEPS: list[tuple[list[int], list[list[int]]]] = [
    ([20, 33], [[7, 2, 0], [4, 8, 1]]),
    ([48, 1, 17], [[1, 2, 3], [5, 0, 0], [6, 7, 0]]),
    ([3], [[8, 0, 0]]),
]


def replayed(decoding: Decoding, run: Callable[[], object], tolerance: float) -> None:
    """Run what was captured for each of the steps, and compare."""
    for lengths, table in STEPS:
        decoding.builder.build(0, decoding.step(lengths, table))
        run()
        for row, (length, blocks) in enumerate(zip(lengths, table, strict=True)):
            got = decoding.output[row].float().cpu()
            torch.testing.assert_close(
                got, decoding.expected(row, length, blocks), atol=tolerance, rtol=tolerance
            )


def test_a_captured_step_reads_the_lengths_of_later_ones(
    policy_file: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CUDA graph does, on a CPU: the arguments of the capture again, after vLLM's buffers have changed."""
    policy_file()
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)
    assert MetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    decoding = Decoding("cpu")
    captured = decoding.builder.build_for_cudagraph_capture(decoding.step([1] * 4, [[0] * 3] * 4))
    assert (captured.max_ctx, captured.max_q, captured.tokens) == (decoding.longest, 1, 4)
    replayed(decoding, lambda: decoding.compute(captured), 1e-4)
    # Planted: a graph that reads what the capture had.
    monkeypatch.setattr(captured, "seq_lens", captured.seq_lens.clone())
    with pytest.raises(AssertionError, match="not close"):
        replayed(decoding, lambda: decoding.compute(captured), 1e-4)


@pytest.mark.gpu
def test_a_step_in_a_cuda_graph() -> None:
    decoding = Decoding("cuda")
    captured = decoding.builder.build_for_cudagraph_capture(decoding.step([1] * 4, [[0] * 3] * 4))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decoding.compute(captured)  # compiled before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream=stream):
        decoding.compute(captured)
    replayed(decoding, graph.replay, 2e-2)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"attn_type": "encoder_only"}, "attn_type encoder_only"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    GristmillAttention(4, 64, 0.125, 2)
    with pytest.raises(ValueError, match=f"does not serve {name}: leave out"):
        GristmillAttention(4, 64, 0.125, 2, **fields)
