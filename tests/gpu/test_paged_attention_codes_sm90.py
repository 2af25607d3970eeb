"""Attention over caches of e4m3 codes on Hopper against the reference: scales of every kind, page and head sizes, lengths that change
under a graph, queries and scales of extreme sizes, wrong scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernels.kv_cache.quantized import quantize
from tests.gpu.test_paged_attention_sm90 import (
    CONFIGS,
    DECODES,
    DEVICE,
    HOPPER,
    MIXES,
    OP,
    launch,
    relative_error,
    scratch,
    text,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
Q, K, V, TABLE, BEGIN, CONTEXTS, SCALE, LSE, K_SCALE, V_SCALE = 0, 1, 2, 3, 4, 5, 8, 11, 13, 14


def drawn(problem_text: str, seed: int = 0) -> tuple[Any, list[Any]]:
    """Returns a problem and its arguments."""
    problem = OP.problem(problem_text)
    return problem, OP.inputs(problem, seed, DEVICE)


def error(problem: Any, arguments: list[Any], given: list[Any] | None = None, decode: bool = True) -> float:
    """Returns the error of one launch relative to the tolerance. given: what the kernel gets instead of the arguments."""
    out = torch.full_like(arguments[Q].contiguous(), float("nan"))
    launch(CONFIGS[0], given or arguments, scratch(out.shape[2]), out, decode)
    outputs, expected = [out], [OP.reference(*arguments[:LSE], None, *arguments[LSE + 1 :])]
    if arguments[LSE] is not None:
        outputs.append((given or arguments)[LSE].clone())
        expected.append(torch.empty_like(arguments[LSE]))
        OP.reference(*arguments[:LSE], expected[1], *arguments[LSE + 1 :])
    return OP.error(problem, arguments, outputs, expected) / OP.tolerance(problem).limit


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [
        (64, 16),
        (64, 7),
        (80, 7),
        (80, 24),
        (96, 1),
        (128, 16),
        (128, 7),
        (128, 256),
        (192, 1),
        (192, 24),
        (256, 16),
        (256, 7),
    ],
)
@pytest.mark.parametrize("kv_scale", ["head", "token"])
def test_decode_of_codes(kv_scale: str, head_dim: int, block_size: int) -> None:
    for number, mix in enumerate(DECODES):
        for heads, kv_heads in ((4, 1), (6, 2), (3, 3), (1, 1), (8 // mix[2], 1)):
            others: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "kv": "fp8"}
            others |= {
                "kv_scale": kv_scale,
                "x": ("bf16", "fp16")[number % 2],
                "lse": number % 2 == 0,
                "sinks": number % 3 == 1,
                "window": (0, 0, 33, 600)[number % 4],
            }
            config = CONFIGS[number % 3]
            config = {**config, "ctas": max(config["ctas"], kv_heads)}
            problem_text = text(mix, heads, kv_heads, **others)
            assert relative_error(problem_text, config, number, decode=True) < 1, problem_text


FP8 = {"kv": "fp8", "kv_scale": "head", "lse": True}
TOKEN = {**FP8, "kv_scale": "token"}
MIX = (6, 7, 1, 3000, 9000)
PREFILL = (333, 5, 150, 700, 2000)


def test_one_scale_per_tensor() -> None:
    problem, arguments = drawn(text(MIX, 8, 2, **FP8))
    for index in (K_SCALE, V_SCALE):
        arguments[index] = arguments[index][:, :, :1].clone()
    assert error(problem, arguments) < 1


@pytest.mark.parametrize("kv_scale", ["head", "token"])
def test_strided_caches_and_scales(kv_scale: str) -> None:
    """Keys and values of a block side by side, and scales as a slice of a wider tensor."""
    problem, arguments = drawn(text(MIX, 8, 2, kv="fp8", kv_scale=kv_scale))
    both = torch.stack([arguments[K].view(torch.uint8), arguments[V].view(torch.uint8)], 1)
    arguments[K], arguments[V] = (both[:, i].view(torch.float8_e4m3fn) for i in range(2))
    for index in (K_SCALE, V_SCALE):
        wider = torch.full(
            (*arguments[index].shape[:2], 2 * arguments[index].shape[2]), float("nan"), device=DEVICE
        )
        wider[..., ::2] = arguments[index]
        arguments[index] = wider[..., ::2]
    assert error(problem, arguments) < 1


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e6, 1e30])
def test_queries_of_any_size(size: float) -> None:
    """Queries become fp16 in the kernel, row by row: neither large nor small ones lose anything."""
    problem, arguments = drawn(text(MIX, 8, 2, **FP8))
    arguments[Q] = (arguments[Q].float() * size).to(torch.bfloat16)
    arguments[SCALE] /= size
    assert error(problem, arguments) < 1


@pytest.mark.parametrize("decode", [True, False])
def test_scales_of_values_of_any_size(decode: bool) -> None:
    """Weights times scales of values stay within fp16, whatever the sizes of the scales; all-zero rows have the smallest one."""
    problem, arguments = drawn(text(MIX if decode else PREFILL, 8, 2, **TOKEN))
    scale = arguments[V_SCALE]
    exponents = torch.randint(-20, 1, scale.shape, device=DEVICE)
    arguments[V_SCALE] = scale * torch.pow(2.0, exponents)
    assert error(problem, arguments, decode=decode) < 1
    zero = torch.rand(scale.shape, device=DEVICE) < 0.5
    arguments[V_SCALE] = torch.where(zero & ~scale.isnan(), torch.full_like(scale, 1e-10 / 448), scale)
    codes = arguments[V].view(torch.uint8)
    codes[zero & ~scale.isnan()] = 0
    assert error(problem, arguments, decode=decode) < 1
    # Nothing but zeros: the output is zero, and the log-sum-exp is what it was.
    owned = ~scale.isnan()
    codes[owned] = 0
    arguments[V_SCALE] = torch.where(owned, torch.full_like(scale, 1e-10 / 448), scale)
    assert error(problem, arguments, decode=decode) < 1


@pytest.mark.parametrize("kv_scale", ["head", "token"])
def test_wrong_scales_are_seen(kv_scale: str) -> None:
    """The scales of two heads swapped, and one token's doubled."""
    problem, arguments = drawn(text(MIX, 8, 2, kv="fp8", kv_scale=kv_scale))
    for index in (K_SCALE, V_SCALE):
        given = list(arguments)
        given[index] = arguments[index].flip(2)
        assert error(problem, arguments, given) > 1
    if kv_scale == "head":
        return
    problem, arguments = drawn(text((1, 1, 1, 40, 40), 4, 1, **TOKEN))
    page, slot = int(arguments[TABLE][0, 1]), 5
    for index in (K_SCALE, V_SCALE):
        for decode in (False, True):
            given = list(arguments)
            given[index] = arguments[index].clone()
            given[index][page, slot, 0] *= 2
            assert error(problem, arguments, given, decode) > 1


def test_a_code_that_is_no_number_is_seen() -> None:
    """In the sequence and head that have it, and nowhere else."""
    _, arguments = drawn(text((2, 2, 1, 100, 200), 8, 2, **FP8))
    out = torch.empty_like(arguments[Q].contiguous())
    for index in (K, V):
        codes = arguments[index].view(torch.uint8)
        at = (int(arguments[TABLE][0, 0]), 3, 1, 7)
        before, codes[at] = int(codes[at]), 0x7F
        launch(CONFIGS[0], arguments, scratch(), out, True)
        codes[at] = before
        seen = out.isnan()
        assert bool(seen[0, 4:].any(1).all()) and not bool(seen[0, :4].any() or seen[1].any())


def test_one_hot() -> None:
    """A key that takes all the weight, at each place of a context, gives its value."""
    context = 70
    problem, arguments = drawn(text((1, 1, 1, context, context), 1, 1, **FP8))
    keys = torch.zeros(arguments[K].shape, device=DEVICE)
    arguments[K_SCALE] = torch.ones(1, 1, 1, device=DEVICE)
    arguments[V_SCALE] = torch.full((1, 1, 1), 0.3, device=DEVICE)
    for place in range(context):
        page, slot = int(arguments[TABLE][0, place // 16]), place % 16
        keys.zero_()
        keys[page, slot, 0, place] = 448.0
        arguments[K] = quantize(keys, arguments[K_SCALE])
        arguments[Q] = torch.zeros_like(arguments[Q].contiguous())
        arguments[Q][0, 0, place] = 50.0
        out = torch.empty_like(arguments[Q])
        launch(CONFIGS[0], arguments, scratch(), out, True)
        value = arguments[V][page, slot, 0].float() * arguments[V_SCALE][0, 0, 0]
        assert torch.equal(out[0, 0], value.to(torch.bfloat16)), place


@pytest.mark.parametrize(
    ("kv_scale", "mix", "decode"),
    [
        ("head", MIX, True),
        ("token", MIX, True),
        ("head", (200, 3, 150, 500, 900), False),
        ("token", (200, 3, 150, 500, 900), False),
    ],
)
def test_lengths_change_under_a_graph(kv_scale: str, mix: tuple[int, ...], decode: bool) -> None:
    problem, arguments = drawn(text(mix, 8, 2, kv="fp8", kv_scale=kv_scale))
    by_token = kv_scale == "token"
    for index in (K, V, *((K_SCALE, V_SCALE) if by_token else ())):
        old = arguments[index]
        arguments[index] = torch.empty((old.shape[0] + 4, *old.shape[1:]), dtype=old.dtype, device=DEVICE)
    arguments[Q] = arguments[Q].contiguous()
    space, out = scratch(), torch.empty_like(arguments[Q])
    _, new = drawn(str(problem), 1)

    def fill(new: list[Any]) -> None:
        for index in (K, V):
            codes = arguments[index].view(torch.uint8)
            codes.fill_(0x7F)
            codes[: new[index].shape[0]] = new[index].view(torch.uint8)
        for index in (K_SCALE, V_SCALE):
            arguments[index].fill_(float("nan"))
            arguments[index][: new[index].shape[0]] = new[index]
        for index in (Q, TABLE, BEGIN, CONTEXTS):
            arguments[index].copy_(new[index])

    fill(new)
    launch(CONFIGS[0], arguments, space, out, decode)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(CONFIGS[0], arguments, space, out, decode)
    for seed in range(2, 7):
        fill(drawn(str(problem), seed)[1])
        graph.replay()
        expected = OP.reference(*arguments)
        assert OP.error(problem, arguments, [out], [expected]) < OP.tolerance(problem).limit, seed


@pytest.mark.parametrize("kv_scale", ["head", "token"])
def test_many_calls_are_bitwise_equal(kv_scale: str) -> None:
    _, arguments = drawn(text((13, 13, 1, 5000, 30000), 8, 2, kv="fp8", kv_scale=kv_scale))
    expected, space = torch.empty_like(arguments[Q].contiguous()), scratch()
    launch(CONFIGS[0], arguments, space, expected, True)
    for _ in range(100):
        out = torch.empty_like(expected)
        launch(CONFIGS[0], arguments, space, out, True)
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(32, 1), (64, 7), (64, 24), (80, 16), (96, 7), (96, 64), (128, 1), (128, 8), (128, 16), (128, 256)],
)
@pytest.mark.parametrize("kv_scale", ["head", "token"])
def test_any_batch_of_codes(kv_scale: str, head_dim: int, block_size: int) -> None:
    for number, mix in enumerate((*MIXES, (300, 2, 250, 900, 1500), (70, 70, 1, 6000, 60000))):
        for heads, kv_heads in ((4, 1), (6, 2), (16, 1)):
            others: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "kv": "fp8"}
            others |= {
                "kv_scale": kv_scale,
                "x": ("bf16", "fp16")[number % 2],
                "lse": number % 2 == 0,
                "sinks": number % 3 == 1,
                "window": (0, 0, 33, 600)[(number + heads) % 4],
            }
            problem_text = text(mix, heads, kv_heads, **others)
            assert relative_error(problem_text, CONFIGS[number % 3], number) < 1, problem_text


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e6, 1e30])
def test_queries_of_any_size_in_any_batch(size: float) -> None:
    problem, arguments = drawn(text(PREFILL, 8, 2, **FP8))
    arguments[Q] = (arguments[Q].float() * size).to(torch.bfloat16)
    arguments[SCALE] /= size
    assert error(problem, arguments, decode=False) < 1


@pytest.mark.parametrize("decode", [False, True])
def test_negative_scales(decode: bool) -> None:
    problem, arguments = drawn(text(MIX, 8, 2, **FP8))
    arguments[K_SCALE] = -arguments[K_SCALE]
    arguments[V_SCALE] = -arguments[V_SCALE]
    assert error(problem, arguments, decode=decode) < 1


@pytest.mark.parametrize("kv_scale", ["head", "token"])
def test_wrong_scales_are_seen_in_any_batch(kv_scale: str) -> None:
    problem, arguments = drawn(text(PREFILL, 8, 2, kv="fp8", kv_scale=kv_scale))
    assert error(problem, arguments, decode=False) < 1
    for index in (K_SCALE, V_SCALE):
        given = list(arguments)
        given[index] = arguments[index].flip(2)
        assert error(problem, arguments, given, decode=False) > 1


@pytest.mark.parametrize("kv_scale", ["head", "token"])
def test_a_row_over_codes_is_the_same_in_any_batch(kv_scale: str) -> None:
    for mix in (PREFILL, (120, 20, 101, 6000, 40000)):
        _, arguments = drawn(text(mix, 8, 2, kv="fp8", kv_scale=kv_scale))
        expected = torch.empty_like(arguments[Q].contiguous())
        launch(CONFIGS[0], arguments, scratch(), expected)
        begin, contexts = arguments[BEGIN].tolist(), arguments[CONTEXTS].tolist()
        for index, context in enumerate(contexts):
            rows = slice(begin[index], begin[index + 1])
            if rows.stop == rows.start:
                continue
            single = list(arguments)
            single[Q], single[TABLE] = arguments[Q][rows], arguments[TABLE][index : index + 1]
            single[BEGIN] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=DEVICE)
            single[CONTEXTS] = torch.tensor([context], dtype=torch.int32, device=DEVICE)
            out = torch.empty_like(single[Q].contiguous())
            launch(CONFIGS[1], single, None, out)
            assert torch.equal(out, expected[rows]), index


@pytest.mark.parametrize("kv_scale", ["head", "token"])
def test_many_calls_of_any_batch_are_bitwise_equal(kv_scale: str) -> None:
    _, arguments = drawn(text((543, 32, 512, 2048, 30000), 8, 2, kv="fp8", kv_scale=kv_scale))
    expected, space = torch.empty_like(arguments[Q].contiguous()), scratch()
    launch(CONFIGS[0], arguments, space, expected)
    for _ in range(100):
        out = torch.empty_like(expected)
        launch(CONFIGS[0], arguments, space, out)
        assert torch.equal(out, expected)
