"""A context whose cache is spread over ranks: each token is on one rank, partial attentions merge to the whole, and a model gives the ids of
one process with a part of the cache on each rank."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.merge_attention_states import op as merge_attention_states
from gristmill.kernels.attention.mla_attention import op as mla_attention
from gristmill.kernels.attention.paged_attention import op as paged_attention
from gristmill.runtime.batch import Batch, make_batch, shard_context
from gristmill.runtime.errors import UsageError
from gristmill.runtime.layers import gathered_context
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS
from tests.runtime.test_models import build

CPU = torch.device("cpu")


def some_batch(dice: random.Random, whole: int) -> tuple[Batch, int]:
    """Returns a step of up to four requests over blocks of `whole` tokens, and the number of blocks."""
    free = list(range(60))
    dice.shuffle(free)
    entries = []
    for name in range(dice.randrange(1, 5)):
        start, count = dice.choice([(0, 1), (0, 9), (dice.randrange(40), 1), (dice.randrange(40), 7)])
        table = [free.pop() for _ in range(-(-(start + count) // whole))]
        entries.append(ScheduledRequest(str(name), start, count, True, [1] * count, table, ()))
    return make_batch(entries, whole, CPU), 60


@pytest.mark.parametrize("seed", range(12))
def test_partial_attentions_over_all_ranks_are_the_whole(seed: int) -> None:
    """Also that each slot is written by one rank, and that a key too few, or one that is not masked, is found."""
    dice = random.Random(seed)
    world, size = dice.choice([(1, 4), (2, 1), (2, 4), (3, 2), (4, 3)])
    batch, blocks = some_batch(dice, world * size)
    torch.manual_seed(seed)
    tokens, heads, latent, rope = len(batch.tokens), 3, 16, 4
    cache = torch.randn(blocks, world * size, latent + rope)
    query = torch.randn(tokens, heads, latent + rope)
    lengths = (batch.max_q, batch.max_ctx, 0.3, latent)
    expected = mla_attention.reference(
        query, cache, batch.block_table, batch.query_start, batch.seq_lens, *lengths
    )

    def attended(short: int = 0, masked: bool = True) -> torch.Tensor:
        out, out_lse = torch.zeros(tokens, heads, latent), torch.full((tokens, heads), -math.inf)
        for rank in range(world):
            part = shard_context(batch, rank, world, size).context_shard
            assert part is not None
            mine = cache.view(blocks, world, size, -1)[:, rank].clone()
            lse = torch.empty(tokens, heads)
            lens = part.seq_lens - (short if rank == 0 else 0)
            bounds = (1, part.max_ctx, 0.3, latent)
            partial = mla_attention.reference(
                query, mine, part.block_table, part.query_start, lens.clamp(min=1), *bounds, lse
            )
            assert int(part.seq_lens.max()) <= part.max_ctx
            if masked:
                lse[part.empty] = -math.inf
            out, out_lse = merge_attention_states.reference(out, out_lse, partial, lse)
        return out

    torch.testing.assert_close(attended(), expected, rtol=1e-5, atol=1e-5)
    if batch.max_ctx > world * size:
        assert not torch.allclose(attended(short=1), expected, atol=1e-5)
    empty = [bool(shard_context(batch, rank, world, size).context_shard.empty.any()) for rank in range(world)]
    if any(empty):
        assert not torch.allclose(attended(masked=False), expected, atol=1e-5)

    places = [shard_context(batch, rank, world, size).slots for rank in range(world)]
    written = torch.stack(places) >= 0
    assert (written.sum(0) == 1).all()
    for rank, slots in enumerate(places):
        mine = slots[written[rank]]
        whole = mine // size * world * size + rank * size + mine % size
        assert torch.equal(whole, batch.slots[written[rank]])


@pytest.mark.parametrize("seed", range(12))
def test_gathered_contexts_are_in_the_order_of_positions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some sequences, as many at a time as there is room for; the others keep their shard. Also that a wrong order is found."""
    dice = random.Random(100 + seed)
    world, size = dice.choice([(1, 4), (2, 1), (2, 4), (3, 2), (4, 3)])
    monkeypatch.setattr(gathered_context, "MOST_GATHERED", dice.choice([1, 30, 1000]))
    batch, blocks = some_batch(dice, world * size)
    torch.manual_seed(seed)
    tokens, heads, dim = len(batch.tokens), 2, 8
    keys, values = torch.randn(2, blocks, world * size, 1, dim)
    query = torch.randn(tokens, heads, dim)
    expected = paged_attention.reference(
        query,
        keys,
        values,
        batch.block_table,
        batch.query_start,
        batch.seq_lens,
        batch.max_q,
        batch.max_ctx,
        0.3,
    )
    batch = shard_context(batch, 0, world, size)
    chosen = [i for i in range(len(batch.lengths)) if dice.random() < 0.7]
    others = [i for i in range(len(batch.lengths)) if i not in chosen]
    parts = gathered_context.spread(batch, chosen, others, world, size)
    out = torch.full_like(query, math.nan)
    for part in parts.gathered:
        at = part.sequences
        # One rank after another has a run of each block.
        arrived = [
            cache.view(blocks, world, size, 1, dim)[part.blocks].flatten(0, 1) for cache in (keys, values)
        ]
        places = (at.block_table, at.query_start, at.seq_lens, at.max_q, at.max_ctx, 0.3)
        out[at.rows] = paged_attention.reference(query[at.rows], *arrived, *places)
        if at.max_ctx > size:
            arrived[1] = arrived[1].flip(0)
            assert not torch.allclose(
                out[at.rows], paged_attention.reference(query[at.rows], *arrived, *places)
            )
    begin = batch.query_start.tolist()
    left = [token for i in others for token in range(begin[i], begin[i + 1])]
    shard = batch.context_shard
    assert shard is not None and (parts.rows is None) == (parts.shard is None) == (not others)
    if parts.rows is not None and parts.shard is not None:
        assert torch.arange(tokens)[parts.rows].tolist() == left
        for name in ("block_table", "seq_lens", "empty"):
            assert torch.equal(getattr(parts.shard, name), getattr(shard, name)[left])
        assert parts.shard.query_start.tolist() == [*range(len(left) + 1)]
        out[left] = expected[left]
    torch.testing.assert_close(out, expected)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [*oracle.prompts()[3:15:4], oracle.prompts()[18][:150]]


def columns_of(llm: LLM, op: str) -> set[int]:
    """Columns of the calls of a collective operation so far."""
    found = default_registry().op(op)
    return {found.problem(row["problem"]).integer("n") for row in llm.explain() if row["op"] == op}


def test_a_model_with_a_part_of_the_cache_on_each_rank(
    make: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    """Chunks, prefix hits, preemptions, sampling, logits that are processed; the cache of each rank is half as large."""
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=3),
        SamplingParams(max_tokens=12, repetition_penalty=1.3, logprobs=2),
        SamplingParams(max_tokens=6, prompt_logprobs=1),
    ]
    alone = make(DEEPSEEK)
    options: dict[str, Any] = {"tensor_parallel": 2, "rank_timeout": 60, "max_batch_tokens": 64}
    options |= {"async_steps": True, "decode_graphs": True}
    ranks = make(DEEPSEEK, context_parallel=True, num_blocks=7, max_seqs=4, **options)
    try:
        expected = [done.token_ids for done in alone.generate(prompts, params)]
        for _ in range(2):
            assert [done.token_ids for done in ranks.generate(prompts, params)] == expected
            ranks.engine.scheduler.check()
        status = ranks.engine.status()
        assert status.block_size == 32 and status.max_request_tokens == 7 * 32
        ids = oracle.window(0)[:129]
        error = (window_logits(ranks.engine, ids) - window_logits(alone.engine, ids)).abs().max()
        assert float(error) < 1e-4
        per_token = alone.engine.status().cache_bytes / (256 * 16)
        assert status.cache_bytes == 7 * 32 * per_token, "of both ranks together: every token once"
        assert "merge_attention_states" in {row["op"] for row in ranks.explain()}
    finally:
        ranks.close()


def test_latents_of_a_long_prompt(make: Callable[..., LLM]) -> None:
    """The chunks after the first get the latents before them from all ranks, next to a request that decodes and a short chunk."""
    prompts = [oracle.window(0)[:9], oracle.window(1, 700), oracle.window(2)[:40]]
    params = [SamplingParams(max_tokens=10, ignore_eos=True), SamplingParams(max_tokens=6, prompt_logprobs=0)]
    params.append(params[0])
    alone = make(DEEPSEEK, max_batch_tokens=400)
    options: dict[str, Any] = {"tensor_parallel": 2, "rank_timeout": 60, "max_batch_tokens": 400}
    ranks = make(DEEPSEEK, context_parallel=True, num_blocks=40, max_seqs=4, **options)
    try:
        expected, found = (llm.generate(prompts, params) for llm in (alone, ranks))
        assert [done.token_ids for done in found] == [done.token_ids for done in expected]
        for one, other in zip(expected[1].prompt_logprobs[1:], found[1].prompt_logprobs[1:], strict=True):
            assert abs(one.logprob - other.logprob) < 1e-4
        assert alone.config.mla is not None
        assert 16 * alone.config.mla.latent_dim in columns_of(ranks, "all_gather"), "of contexts"
    finally:
        ranks.close()


@pytest.mark.parametrize("kv_dtype", ["fp8", pytest.param("fp8_token_head", marks=pytest.mark.slow)])
def test_a_cache_of_codes(kv_dtype: str, make: Callable[..., LLM], prompts: list[list[int]]) -> None:
    """Codes and their scales come from all ranks as they are: logits are those of ranks that have their KV heads of all tokens."""
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    options: dict[str, Any] = {"tensor_parallel": 2, "rank_timeout": 60, "kv_dtype": kv_dtype, "max_seqs": 4}
    ids, found = oracle.window(0)[:129], []
    for spread in (False, True):
        ranks = make(
            LLAMA, context_parallel=spread, num_blocks=7 * (2 - spread), max_batch_tokens=64, **options
        )
        try:
            answers = [done.token_ids for done in ranks.generate(prompts, params)]
            found.append((answers, window_logits(ranks.engine, ids)))
        finally:
            ranks.close()
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "block_size", "invariant"), [(4, 16, False), (2, 5, True)])
def test_other_numbers_of_ranks(
    world: int,
    block_size: int,
    invariant: bool,
    make: Callable[..., LLM],
    policy: Policy,
    prompts: list[list[int]],
) -> None:
    params, mine = SamplingParams(max_tokens=24), replace(policy, batch_invariant=invariant)
    expected = [done.token_ids for done in make(DEEPSEEK, policy=mine).generate(prompts, params)]
    options = {"tensor_parallel": world, "rank_timeout": 120, "block_size": block_size, "policy": mine}
    ranks = make(DEEPSEEK, context_parallel=True, **options)
    try:
        ranks.engine.warm_up()
        first, second = (ranks.generate(prompts, params) for _ in range(2))
        assert [done.token_ids for done in first] == expected
        assert [done.token_ids for done in second] == expected
    finally:
        ranks.close()


def test_a_model_with_kv_heads(make: Callable[..., LLM], prompts: list[list[int]]) -> None:
    """Every rank has all KV heads for its tokens; steps run over the buffers of decode graphs, too."""
    params = [SamplingParams(max_tokens=10, ignore_eos=True), SamplingParams(max_tokens=10, logprobs=2)] * 2
    alone = make(LLAMA)
    options: dict[str, Any] = {"tensor_parallel": 2, "rank_timeout": 60, "max_batch_tokens": 64}
    ranks = make(LLAMA, context_parallel=True, num_blocks=7, decode_graphs=True, max_seqs=4, **options)
    try:
        expected = [done.token_ids for done in alone.generate(prompts, params)]
        assert [done.token_ids for done in ranks.generate(prompts, params)] == expected
        ids = oracle.window(0)[:129]
        error = (window_logits(ranks.engine, ids) - window_logits(alone.engine, ids)).abs().max()
        assert float(error) < 1e-4
        status = ranks.engine.status()
        assert status.cache_bytes == 7 * 32 * (alone.engine.status().cache_bytes / (256 * 16))
        assert any(row["steps"] for row in ranks.explain_graphs() if row["seqs"])
        own = 16 * (alone.config.num_kv_heads // 2) * alone.config.head_dim
        assert own in columns_of(ranks, "all_to_all"), "the KV heads of a rank, of contexts"
    finally:
        ranks.close()


@pytest.mark.slow
def test_ranks_that_have_the_same_kv_head(make: Callable[..., LLM], prompts: list[list[int]]) -> None:
    """Two KV heads for four ranks."""
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = [done.token_ids for done in make(LLAMA).generate(prompts, params)]
    options: dict[str, Any] = {"tensor_parallel": 4, "rank_timeout": 120, "max_batch_tokens": 64}
    ranks = make(LLAMA, context_parallel=True, num_blocks=7, max_seqs=4, **options)
    try:
        assert [done.token_ids for done in ranks.generate(prompts, params)] == expected
        assert 16 * 64 in columns_of(ranks, "all_to_all"), "one KV head, of contexts"
    finally:
        ranks.close()


def test_windows_are_refused(make: Callable[..., LLM], tmp_path: Path) -> None:
    build("gpt-oss", tmp_path, sliding_window=8)
    with pytest.raises(UsageError, match="layers that see a window of 8 tokens"):
        make(tmp_path, tensor_parallel=2, context_parallel=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (DEEPSEEK, {"tensor_parallel": 1}, "True with tensor_parallel of at least 2, got True and 1"),
        (DEEPSEEK, {"context_parallel": 2}, "context_parallel is True or False"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(MODELS / name, **{"tensor_parallel": 2, "context_parallel": True, **options})
