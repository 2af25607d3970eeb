"""KV caches of e4m3 codes: rounding against an independent oracle, scales of every kind, writes and reads,
refusals, planted faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from gristmill import ops
from gristmill.kernels.attention.paged_attention import op as paged_attention
from gristmill.kernels.kv_cache import reshape_and_cache
from tests.calls import positional
from tests.kernels.running import Runnable, runnables, verify_fault

SLOTS = torch.tensor([5, -1, 0, 13, -7, 2])
KINDS = ["tensor", "head", "token"]


def oracle(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the codes of numpy and ml_dtypes, uint8: IEEE division, saturation, round to nearest even."""
    with np.errstate(invalid="ignore", over="ignore"):
        quotient = values.float().numpy() / scale.numpy()[..., None]
        codes = np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return torch.from_numpy(np.where(np.isnan(quotient), 0x7F, codes).astype(np.uint8))


def scales(kind: str, blocks: int, size: int, heads: int, seed: int = 0) -> torch.Tensor:
    """Returns scales of a kind. Scales of tokens are NaN until they are written."""
    if kind == "token":
        return torch.full((blocks, size, heads), math.nan)
    shape = (1, 1, 1) if kind == "tensor" else (1, 1, heads)
    return 2 ** (-7 + 4 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)))


def codes(*shape: int) -> torch.Tensor:
    """Returns a cache of arbitrary bytes."""
    codes_of_cache = torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5)
    )
    return codes_of_cache.view(torch.float8_e4m3fn)


def written(
    tokens: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the tokens to SLOTS one at a time, on copies. Returns (bytes of the cache, scales)."""
    cached, scale = cache.view(torch.uint8).clone(), scale.clone()
    by_token = scale.shape[0] > 1
    for token, slot in zip(tokens, SLOTS.tolist(), strict=True):
        if slot < 0:
            continue
        place = (slot // cache.shape[1], slot % cache.shape[1])
        token_scale = (token.float().abs().amax(-1).clamp(min=1e-10) / 448) if by_token else scale[0, 0]
        if by_token:
            scale[place] = token_scale
        cached[place] = oracle(token, token_scale.expand(token.shape[0]))
    return cached, scale


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bytes are equal, or floats with NaN in the same places."""
    if actual.dtype.itemsize == 1:
        return torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    return torch.equal(actual.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache"), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_and_scales_are_those_of_the_oracle(
    implementation: Runnable, kind: str, dtype: torch.dtype
) -> None:
    """Keys and values are interleaved in one tensor, as some hosts hold them; head sizes differ and are odd;
    tokens are rows of a matrix product."""
    qkv = (torch.randn(6, 3 * 33 + 3 * 18) * 3).to(dtype)
    key, value = qkv[:, :99].view(6, 3, 33), qkv[:, 99:].view(6, 3, 18)
    both_caches = codes(4, 4, 3, 33 + 18)
    key_cache, value_cache = both_caches[..., :33], both_caches[..., 33:]
    k_scale, v_scale = scales(kind, 4, 4, 3, 1), scales(kind, 4, 4, 3, 2)
    expected = written(key, key_cache, k_scale), written(value, value_cache, v_scale)
    implementation(key, value, key_cache, value_cache, SLOTS, k_scale, v_scale)
    assert same(key_cache, expected[0][0]) and same(value_cache, expected[1][0])
    assert same(k_scale, expected[0][1]) and same(v_scale, expected[1][1])


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache"), ids=str)
def test_rounding_of_every_tie_and_neighbour(implementation: Runnable) -> None:
    """Every code, every midpoint between two codes, the float32 neighbours of both, values that saturate,
    zeros of both signs."""
    finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat(
        (finite, (finite[1:] + finite[:-1]) / 2, torch.tensor([448.1, 463.9, 464.0, 465.0, 1e30]))
    )
    up, down = (torch.nextafter(points, torch.tensor(limit)) for limit in (math.inf, -math.inf))
    values = torch.cat((points, up, down))
    values = torch.cat(
        (values, -values, torch.tensor([math.inf, -math.inf, math.nan, 1e-40, -1e-40, 0.0, -0.0]))
    )
    values = values.view(1, 1, -1)
    cache, other = codes(1, 1, 1, values.shape[-1]), codes(1, 1, 1, 1)
    one = torch.ones(1, 1, 1)
    implementation(values, torch.ones(1, 1, 1), cache, other, torch.tensor([0]), one, one)
    assert same(cache.view(torch.uint8)[0], oracle(values, torch.ones(1, 1)))
    assert (cache.view(torch.uint8)[0, 0, 0, -7:] == torch.tensor([0x7E, 0xFE, 0x7F, 0, 0x80, 0, 0x80])).all()


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache"), ids=str)
def test_a_row_without_finite_amax_shows_in_its_scale(implementation: Runnable) -> None:
    """NaN, infinity and zeros in one head each; the heads beside them are not affected."""
    key = torch.randn(2, 4, 20)
    key[0, 0, 19], key[0, 1, 3], key[0, 2] = math.nan, -math.inf, 0
    cache, scale = codes(2, 2, 4, 20), torch.zeros(2, 2, 4)
    implementation(key, key, cache, cache.clone(), torch.tensor([1, 2]), scale, scale.clone())
    row = cache[0, 1].float() * scale[0, 1][:, None]
    assert (
        scale[0, 1, 0].isnan()
        and scale[0, 1, 1].isinf()
        and scale[0, 1, 2] == np.float32(1e-10) / np.float32(448)
    )
    assert row[:2].isnan().all() and (row[2] == 0).all()
    assert ((row[3] - key[0, 3]).abs() <= key[0, 3].abs() / 16 + scale[0, 1, 3] / 512).all()


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache"), ids=str)
def test_scales_of_tokens_inside_a_padded_cache(implementation: Runnable) -> None:
    """Scales may be strided: here they follow the codes of each head in one allocation, as in vLLM."""
    key, value = torch.randn(6, 2, 12), torch.randn(6, 2, 12)
    allocation = codes(2, 4, 4, 2, 16).view(torch.uint8)
    key_cache, value_cache = (part[..., :12].view(torch.float8_e4m3fn) for part in allocation)
    k_scale, v_scale = (part[..., 12:].view(torch.float32)[..., 0] for part in allocation)
    expected = written(key, key_cache, k_scale), written(value, value_cache, v_scale)
    implementation(key, value, key_cache, value_cache, SLOTS, k_scale, v_scale)
    for (codes_expected, scale_expected), cache, scale in zip(
        expected, (key_cache, value_cache), (k_scale, v_scale), strict=True
    ):
        assert same(cache, codes_expected) and same(scale, scale_expected)


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache"), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_64_bits_wide(implementation: Runnable, kind: str) -> None:
    """Blocks are 2^31 bytes apart; only the pages that are written occupy memory."""
    flat = torch.empty(3 * 2**31, dtype=torch.uint8).view(torch.float8_e4m3fn)
    cache, key = flat.view(3, 2**15, 2**16)[:, :4, :8].unflatten(-1, (1, 8)), torch.randn(2, 1, 8)
    small = codes(3, 4, 1, 8)
    k_scale, v_scale = scales(kind, 3, 4, 1), scales(kind, 3, 4, 1)
    implementation(key, key, cache, small, torch.tensor([11, 4]), k_scale, v_scale)
    assert same(cache[2, 3].clone(), small[2, 3].clone()) and same(cache[1, 0].clone(), small[1, 0].clone())


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache"), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_past_the_cache_is_never_written(implementation: Runnable, kind: str) -> None:
    around, outside = codes(6, 3, 1, 8), torch.full((6, 3, 1), 7.0)
    before = around.clone()
    k_scale = outside[1:5] if kind == "token" else scales(kind, 4, 3, 1)
    key, slots = torch.ones(2, 1, 8), torch.tensor([12, 12])
    arguments = (key, key, around[1:5], codes(4, 3, 1, 8), slots, k_scale, k_scale.clone())
    if implementation.kernel.language == "triton":
        implementation(*arguments)
    else:
        with pytest.raises(ValueError, match="slot 12 is past the cache of 12 slots"):
            implementation(*arguments)
    assert same(around, before) and (outside == 7).all()


@positional
def head_scales_shifted(config: Any, *arguments: Any) -> None:
    *rest, k_scale, v_scale = arguments
    reshape_and_cache.reference(*rest, k_scale.roll(1, -1), v_scale)


@positional
def one_scale_for_all_heads(config: Any, *arguments: Any) -> None:
    *rest, k_scale, v_scale = arguments
    reshape_and_cache.reference(*rest, k_scale[..., :1].contiguous(), v_scale)


@positional
def rounded_toward_zero(config: Any, *arguments: Any) -> None:
    key, *rest = arguments
    reshape_and_cache.reference((key.float() * 0.97).to(key.dtype), *rest)


@positional
def scale_not_written(config: Any, *arguments: Any) -> None:
    *rest, k_scale, v_scale = arguments
    reshape_and_cache.reference(*rest, k_scale, v_scale.clone())


@positional
def scale_of_the_tensor(config: Any, key: Any, value: Any, *rest: Any) -> None:
    """Planted fault: every token and head has the scale of the largest."""
    top = torch.zeros_like(key)
    top[..., 0] = key.abs().amax()
    *caches, slots, k_scale, v_scale = rest
    reshape_and_cache.reference(key, value, *caches, slots, k_scale, v_scale)
    reshape_and_cache.reference(top, value, caches[0].clone(), caches[1].clone(), slots, k_scale, v_scale)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("head_scales_shifted", "head"),
        ("one_scale_for_all_heads", "head"),
        ("rounded_toward_zero", "head"),
        ("rounded_toward_zero", "token"),
        ("scale_not_written", "token"),
        ("scale_of_the_tensor", "token"),
    ],
)
def test_verification_catches_wrong_kernels(fault: str, kind: str) -> None:
    text = f"t=33,h=3,d=16,dv=16,block_size=5,x=bf16,kv=fp8,kv_scale={kind}"
    assert not verify_fault("reshape_and_cache", __name__, fault, text).ok


def attention_arguments(kind: str) -> dict[str, Any]:
    names = [parameter.name for parameter in paged_attention.OP.parameters]
    text = "q_tokens=9,seqs=3,max_q=5,max_ctx=40,total_ctx=77,heads=6,kv_heads=3,head_dim=32,block_size=8,lse=true"
    problem = paged_attention.OP.problem(f"{text},kv=fp8,kv_scale={'token' if kind == 'token' else 'head'}")
    a = dict(zip(names, paged_attention.OP.inputs(problem, 0, "cpu"), strict=True))
    if kind == "tensor":
        a["k_scale"], a["v_scale"] = a["k_scale"][..., :1].clone(), a["v_scale"][..., 1:2].clone()
    return a


@pytest.mark.parametrize("implementation", runnables("paged_attention"), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_reads_what_the_codes_and_scales_say(implementation: Runnable, kind: str) -> None:
    """A cache of codes gives the result of a float32 cache of code · scale; keys, values and their scales are
    interleaved."""
    a = attention_arguments(kind)
    keys, values = (a[f"{n}_cache"].float() * a[f"{n}_scale"][..., None] for n in "kv")
    plain = dict(
        a, q=a["q"].float(), k_cache=keys, v_cache=values, k_scale=None, v_scale=None, lse=torch.empty(9, 6)
    )
    expected = paged_attention.reference(**plain)
    together = torch.cat((a["k_cache"].view(torch.uint8), a["v_cache"].view(torch.uint8)), -1)
    both = torch.stack((a["k_scale"], a["v_scale"]), -1)
    a["k_cache"], a["v_cache"] = together.view(torch.float8_e4m3fn).split(32, -1)
    a["k_scale"], a["v_scale"] = both.unbind(-1)
    out = torch.full(a["q"].shape, math.nan, dtype=a["q"].dtype)
    implementation(*a.values(), out)
    rms = expected.square().mean(-1, keepdim=True).sqrt()
    assert float(((out.float() - expected).abs() / torch.maximum(expected.abs(), rms)).max()) <= 1.3e-2
    assert (a["lse"] - plain["lse"]).abs().max() <= 2e-4


@pytest.mark.parametrize("implementation", runnables("paged_attention"), ids=str)
@pytest.mark.parametrize("kind", ["head", "token"])
@pytest.mark.parametrize("power", [-40, -14, 6, 40])
def test_scales_of_any_size(implementation: Runnable, kind: str, power: int) -> None:
    """Values in float16 with scales far from 1: no weight times its scale is rounded to a subnormal, or to 0
    (0.02 would be)."""
    a = attention_arguments(kind)
    a["q"], a["v_scale"] = a["q"].half(), a["v_scale"] * 2.0**power
    a["q"] = a["q"] if power < 6 else a["q"].float()
    expected = paged_attention.reference(**dict(a, q=a["q"].float(), lse=torch.empty(9, 6)))
    out = torch.full(a["q"].shape, math.nan, dtype=a["q"].dtype)
    implementation(*a.values(), out)
    if power == -14:  # the output itself is rounded to subnormals of float16
        assert (
            (out.float() - expected).abs()
            <= 2.0**-24 + expected.abs() * 2e-3 + 2e-3 * expected.square().mean().sqrt()
        ).all()
    elif power > 0:
        rms = expected.square().mean(-1, keepdim=True).sqrt()
        assert float(((out - expected).abs() / torch.maximum(expected.abs(), rms)).max()) <= 4e-5
    else:
        assert (out.float() == 0).all()


@pytest.mark.parametrize("implementation", runnables("paged_attention"), ids=str)
def test_nan_codes_are_seen(implementation: Runnable) -> None:
    """NaN in the values of a head reaches the query that attends to it, and no other head or sequence."""
    a = attention_arguments("head")
    sequence = int(a["query_start"].diff().argmax())
    row, last = int(a["query_start"][sequence + 1]) - 1, int(a["seq_lens"][sequence]) - 1
    slot = int(a["block_table"][sequence, last // 8]), last % 8
    for code in (0x7F, 0xFF):
        a["v_cache"].view(torch.uint8)[(*slot, 1, 3)] = code
        out = torch.full(a["q"].shape, 7.0, dtype=a["q"].dtype)
        implementation(*a.values(), out)
        assert out[row, 2:4, 3].isnan().all()
        out[int(a["query_start"][sequence]) : row + 1, 2:4] = 0
        assert not out.isnan().any()


def test_what_is_written_is_read() -> None:
    """Through the operators, with scales of tokens: within half an e4m3 step of the values; the guards accept
    every kind."""
    key, value = torch.randn(6, 2, 16).bfloat16(), torch.randn(6, 2, 16).bfloat16()
    slots = torch.arange(6)
    for kind in KINDS:
        caches = torch.zeros(2, 2, 4, 2, 16, dtype=torch.float8_e4m3fn)
        k_scale, v_scale = (scales(kind, 2, 4, 2, seed) for seed in (1, 2))
        ops.reshape_and_cache(key, value, *caches, slots, k_scale, v_scale)
        read = caches[1].float() * v_scale[..., None]
        step = value.float().abs() / 16 + v_scale.nan_to_num(0).amax() / 512
        assert ((read.flatten(0, 1)[:6] - value.float()).abs() <= step).all()
        table = torch.tensor([[0, 1]], dtype=torch.int32)
        start, context = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
        q = torch.randn(6, 4, 16).bfloat16()
        out = ops.paged_attention(
            q, *caches, table, start, context, 6, 6, 0.25, k_scale=k_scale, v_scale=v_scale
        )
        assert torch.isfinite(out.float()).all()


def harden(name: str, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Changes q, keys and values [tokens, heads, D] of one long context in place."""
    if name == "constant values":
        values.fill_(1.0)
    elif name == "flat scores":
        keys.zero_()
    elif name == "one key dominates":
        keys[611] = q[-1, ::2] * 4
    elif name == "the last key dominates":
        keys[-1] = q[-1, ::2] * 4
    elif name == "scores of 60 and -60":
        keys.mul_(8)
    else:  # outlier channels
        keys[..., 5::16] *= 20


HARD = (
    "constant values",
    "flat scores",
    "one key dominates",
    "the last key dominates",
    "scores of 60 and -60",
    "outlying channels",
)


@pytest.mark.parametrize("implementation", runnables("paged_attention"), ids=str)
@pytest.mark.parametrize("name", HARD)
def test_hard_values(implementation: Runnable, name: str) -> None:
    """A context of several parts and chunks against float64 over the dequantized cache, with scales of
    tokens, in every kernel."""
    generator = torch.Generator().manual_seed(4)
    context, heads, dim = 1301, 2, 64
    q, keys, values = (
        torch.randn(n, h, dim, generator=generator) for n, h in ((3, 4), (context, heads), (context, heads))
    )
    harden(name, q, keys, values)
    blocks = -(-context // 16)
    caches, scales_of_tokens = (
        torch.zeros(2, blocks, 16, heads, dim, dtype=torch.float8_e4m3fn),
        torch.zeros(2, blocks, 16, heads),
    )
    reshape_and_cache.reference(keys, values, *caches, torch.arange(context), *scales_of_tokens)
    read = (
        (caches.double() * scales_of_tokens[..., None].double())
        .flatten(1, 2)[:, :context]
        .repeat_interleave(2, 2)
    )
    q = q.bfloat16()
    scores = torch.einsum("qhd,khd->hqk", q.double(), read[0]) * dim**-0.5
    own_place = torch.arange(context - 3, context)[:, None]
    weights = scores.masked_fill(torch.arange(context) > own_place, -math.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, read[1])
    index = {"dtype": torch.int32}
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    implementation(
        q,
        *caches,
        torch.arange(blocks, **index)[None],
        torch.tensor([0, 3], **index),
        torch.tensor([context], **index),
        3,
        context,
        dim**-0.5,
        0,
        None,
        None,
        None,
        *scales_of_tokens,
        out=out,
    )
    rms = expected.square().mean(-1, keepdim=True).sqrt()
    assert float(((out.double() - expected).abs() / torch.maximum(expected.abs(), rms)).max()) <= 1.3e-2


def test_inductor_compiles_the_write_and_the_read(
    policy_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiles to one graph, which also serves another number of blocks; the caches and the scales of tokens
    are written in place."""
    from torch._inductor import config as inductor_config

    policy_file()

    def step(q: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        *caches, k_scale, v_scale = buffers
        index = {"dtype": torch.int32}
        ops.reshape_and_cache(q[:, :2], q[:, 2:], *caches, torch.arange(6), k_scale, v_scale)
        places = torch.tensor([[0, 1]], **index), torch.tensor([0, 6], **index), torch.tensor([6], **index)
        return ops.paged_attention(q, *caches, *places, 6, 6, 0.25, k_scale=k_scale, v_scale=v_scale)

    # For two small sources, to compile torch's headers beforehand takes longer than to read them.
    monkeypatch.setattr(inductor_config, "cpp_cache_precompile_headers", False)
    compiled = torch.compile(step, fullgraph=True)
    for blocks in (2, 3):
        q, results = torch.randn(6, 4, 16).bfloat16(), []
        for run in (step, compiled):
            cache_tensors = [torch.zeros(blocks, 4, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
            cache_tensors += [torch.zeros(blocks, 4, 2) for _ in range(2)]
            results.append([run(q, *cache_tensors), *cache_tensors])
        assert all(same(one, other) for one, other in zip(*results, strict=True))
        assert all(bool(scale.flatten(0, 1)[:6].all()) for scale in results[1][3:])


def bad(**changes: Any) -> dict[str, Any]:
    key = torch.randn(6, 2, 8)
    cache = torch.zeros(4, 4, 2, 8, dtype=torch.float8_e4m3fn)
    named = ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")
    one = torch.ones(1, 1, 1)
    values = (key, key.clone(), cache, cache.clone(), SLOTS, one, one.clone())
    return dict(zip(named, values, strict=True)) | changes


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"k_scale": None, "v_scale": None},
        ValueError,
        r"fp8 caches need k_scale and v_scale, float32 \[1, 1, 1\]",
    ),
    ({"v_scale": None}, ValueError, "k_scale and v_scale must be given together"),
    ({"k_scale": torch.ones(1)}, ValueError, "k_scale must be .*scale_blocks, scale_slots, scale_heads"),
    (
        {"v_scale": torch.ones(1, 1, 2)},
        ValueError,
        r"v_scale must be .*= \[1, 1, 1\], scale_blocks as in k_scale",
    ),
    (
        {"k_scale": torch.ones(1, 1, 3), "v_scale": torch.ones(1, 1, 3)},
        ValueError,
        r"k_scale must be \[1, 1, 1\], \[1, 1, kv_heads\] = \[1, 1, 2\] or .* = \[4, 4, 2\], got \[1, 1, 3\]",
    ),
    (
        {"k_scale": torch.ones(0, 1, 2), "v_scale": torch.ones(0, 1, 2)},
        ValueError,
        r"got \[0, 1, 2\]",
    ),
    (
        {"k_scale": torch.ones(4, 4, 1), "v_scale": torch.ones(4, 4, 1)},
        ValueError,
        r"got \[4, 4, 1\]",
    ),
    ({"k_scale": torch.ones(1, 1, 1).double()}, TypeError, "k_scale must be torch.float32"),
    (
        {"key_cache": torch.zeros(4, 4, 2, 8), "value_cache": torch.zeros(4, 4, 2, 8)},
        ValueError,
        "k_scale and v_scale are for quantized caches",
    ),
    (
        {"value_cache": torch.zeros(4, 4, 2, 8)},
        TypeError,
        "value_cache must have key_cache's dtype torch.float8_e4m3fn",
    ),
    (
        {"key_cache": torch.zeros(4, 4, 2, 8, dtype=torch.float8_e5m2)},
        TypeError,
        "key_cache must have key's dtype torch.float32 or torch.float8_e4m3fn, got torch.float8_e5m2",
    ),
    (
        {"k_scale": torch.ones(1, 1, 1).expand(4, 4, 2), "v_scale": torch.ones(4, 4, 2)},
        ValueError,
        "k_scale is written, so its elements must not overlap",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_refusals(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ops.reshape_and_cache(**bad(**changes))


def test_guards_hold_plans_to_their_caches() -> None:
    op = reshape_and_cache.OP
    for kind in ("head", "token"):
        guard = op.guard(op.static(op.problem(f"h=2,d=8,dv=8,block_size=4,x=fp32,kv=fp8,kv_scale={kind}")))
        tensor_scale, token_scale = torch.ones(1, 1, 2), torch.ones(4, 4, 2)
        if kind == "token":
            tensor_scale, token_scale = token_scale, tensor_scale
        assert guard(op.Call(*bad(k_scale=tensor_scale, v_scale=tensor_scale.clone()).values())) == 6
        plain = torch.zeros(4, 4, 2, 8)
        for changes in (
            {"k_scale": token_scale, "v_scale": token_scale},
            {"k_scale": None, "v_scale": None},
            {"k_scale": tensor_scale, "v_scale": None},
            {
                "k_scale": tensor_scale[..., :1].contiguous().expand(*tensor_scale.shape[:2], 3),
                "v_scale": tensor_scale.new_ones(*tensor_scale.shape[:2], 3),
            },
            {"k_scale": tensor_scale, "v_scale": tensor_scale, "key_cache": plain, "value_cache": plain},
        ):
            with pytest.raises(ValueError, match="planned for"):
                guard(op.Call(*bad(**changes).values()))


@pytest.mark.parametrize("op", [reshape_and_cache.OP, paged_attention.OP], ids=lambda op: op.name)
def test_keys_of_problems_without_codes_are_what_they_were(op: Any) -> None:
    """Stores of times and verifications hold these texts."""
    text = next(example for example in op.examples if "kv=" not in example)
    problem = op.problem(text)
    assert "kv=" not in str(problem) and "kv_scale=" not in str(problem)
    assert problem.text("kv") == "x" and problem.text("kv_scale") == "none"
    with pytest.raises(ValueError, match="kv=fp8 does not go with kv_scale=none"):
        op.problem(f"{text},kv=fp8")
    with pytest.raises(ValueError, match="kv=x does not go with kv_scale=head"):
        op.problem(f"{text},kv_scale=head")
