"""Attention over dense sequences on Hopper against the reference: lengths at edges, numbers of heads and sizes of them, more and fewer
sequences than the kernel sorts, windows, strides, rows that do not depend on the batch, graphs, repeated calls, streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.varlen_attention.sm90.spec import EXAMPLES
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("varlen_attention")
CONFIGS = ({"ctas": 132}, {"ctas": 5}, {"ctas": 1})
MIXES = (  # q_tokens, seqs, max_q, max_ctx, total_ctx
    (1, 1, 1, 1, 1),
    (7, 1, 7, 7, 7),
    (5, 7, 1, 300, 900),
    (257, 1, 257, 257, 257),
    (260, 3, 200, 511, 900),
    (128, 1, 128, 1000, 1000),
    (1500, 6, 700, 900, 3000),
)


def text(mix: tuple[int, ...], heads: int, kv_heads: int, **others: Any) -> str:
    axes = dict(zip(("q_tokens", "seqs", "max_q", "max_ctx", "total_ctx"), mix, strict=True))
    return ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in {**axes, "heads": heads, "kv_heads": kv_heads, **others}.items()
    )


def launch(config: dict[str, int], arguments: list[Any], out: torch.Tensor) -> None:
    from gristmill.kernels.attention.varlen_attention.sm90._launch import launch as launcher

    launcher(config, make_call("varlen_attention", *arguments, out))


def fenced(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with rows of NaN before and behind it in memory."""
    buffer = torch.full(
        (tensor.shape[0] + 200, *tensor.shape[1:]), float("nan"), dtype=tensor.dtype, device=DEVICE
    )
    buffer[100 : 100 + len(tensor)] = tensor
    return buffer[100 : 100 + len(tensor)]


def relative_error(problem_text: str, config: dict[str, int] = CONFIGS[0], seed: int = 0) -> float:
    """The error of one call relative to the tolerance. Keys, values and queries are fenced with NaN; what is around the result stays
    as it was, and a second call gives the same bits."""
    problem = OP.problem(problem_text)
    arguments = OP.inputs(problem, seed, DEVICE)
    arguments[:3] = [fenced(tensor) for tensor in arguments[:3]]
    q, v, begin, lse = arguments[0], arguments[2], arguments[3], arguments[8]
    used, results = int(begin[-1]), []
    for _ in range(2):
        shape = (q.shape[0] + 2, q.shape[1], v.shape[2])
        buffer = torch.full(shape, float("nan"), dtype=q.dtype, device=DEVICE)
        launch(config, arguments, buffer[1:-1])
        assert bool(buffer[0].isnan().all() and buffer[-1].isnan().all()), "wrote outside of out"
        results.append(buffer[1 : used + 1])
    assert torch.equal(*results), "two calls differ"
    outputs, reference = [results[0]], list(arguments)
    if lse is not None:
        outputs.append(lse[:used].clone())
        reference[8] = torch.empty_like(lse)
    expected = [OP.reference(*reference)[:used]]
    if lse is not None:
        expected.append(reference[8][:used])
    return OP.error(problem, arguments, outputs, expected) / OP.tolerance(problem).limit


@pytest.mark.parametrize("x", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("qk_dim", "v_dim"), [(192, 128), (128, 128), (136, 64), (64, 72), (64, 64), (96, 128), (184, 120)]
)
def test_lengths_and_heads(x: str, qk_dim: int, v_dim: int) -> None:
    for number, mix in enumerate(MIXES):
        for heads, kv_heads in ((3, 3), (6, 2), (16, 1)):
            others = {"qk_dim": qk_dim, "v_dim": v_dim, "x": x, "lse": number % 2 == 0}
            problem_text = text(mix, heads, kv_heads, **others)
            assert relative_error(problem_text, CONFIGS[number % 3], number) < 1, problem_text


WINDOWS = (
    (-1, -1),
    (0, 0),
    (5, 3),
    (64, 64),
    (127, -1),
    (-1, 200),
    (300, 1),
    (0, -1),
    (129, 0),
    (10**9, 7),
    (3, 10**9),
)


@pytest.mark.parametrize("x", ["bf16", "fp16"])
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(192, 128), (128, 128), (64, 64), (72, 64), (64, 128)])
def test_windows(x: str, qk_dim: int, v_dim: int) -> None:
    """Keys before and after a query's own, all and none of them; tiles of keys that some rows, or none, see; contexts that end within a window,
    longer and shorter than the queries."""
    for place, (left, right) in enumerate(WINDOWS):
        for number, mix in enumerate(MIXES):
            windows = {"window_left": left, "window_right": right}
            others = {"qk_dim": qk_dim, "v_dim": v_dim, "x": x, "lse": (number + place) % 2 == 0}
            problem_text = text(mix, 3, 1, **others, **windows)
            assert relative_error(problem_text, CONFIGS[(number + place) % 3], number) < 1, problem_text


@pytest.mark.parametrize("length", [1, 63, 65, 128, 129, 257, 385])
def test_windows_end_at_any_key(length: int) -> None:
    """Windows that begin and end at tiles, and one key before and after."""
    mix = (length, 1, length, length, length)
    for left in (0, 62, 63, 64, 127, 128, 129, -1):
        for right in (1, 63, 64, 127, 128, -1):
            windows = {"window_left": left, "window_right": right}
            assert relative_error(text(mix, 2, 2, qk_dim=64, v_dim=64, **windows)) < 1, windows


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [(128, 64), (0, 0), (200, -1), (-1, 17), (5, 300)], ids=str)
def test_values_of_tiles_that_nobody_sees(window: tuple[int, int], dim: int) -> None:
    """NaN in them changes no bit: no tile of keys too many is multiplied, before the window of a tile of queries or behind it. Where a query sees
    it, it shows."""
    length, (left, right) = 640, window
    windows = {"window_left": left, "window_right": right}
    arguments = OP.inputs(
        OP.problem(text((length, 1, length, length, length), 2, 2, qk_dim=dim, v_dim=dim, **windows)),
        4,
        DEVICE,
    )
    expected, out = (torch.empty(length, 2, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    launch(CONFIGS[0], arguments, expected)
    for begin in range(0, length, 128):
        spoiled = list(arguments)
        spoiled[2] = arguments[2].clone()
        first = 0 if left < 0 else max(0, begin - left) // 128 * 128
        end = length if right < 0 else min(length, begin + 128 + right)
        spoiled[2][:first] = spoiled[2][end:] = float("nan")
        launch(CONFIGS[0], spoiled, out)
        assert torch.equal(out[begin : begin + 128], expected[begin : begin + 128]), begin
        spoiled[2][begin + 127] = float("nan")
        launch(CONFIGS[0], spoiled, out)
        assert bool(out[begin + 127].isnan().all()), begin


@pytest.mark.parametrize("window", [(0, 0), (5, 3), (64, 64), (127, 129), (-1, 130), (200, -1)], ids=str)
def test_one_key_more_or_less_is_seen(window: tuple[int, int]) -> None:
    """The tolerance tells windows from those that are one key shorter or longer on one side."""
    axes = dict(zip(("window_left", "window_right"), window, strict=True))
    problem = OP.problem(text((500, 2, 300, 300, 500), 4, 4, qk_dim=64, v_dim=64, **axes))
    arguments = OP.inputs(problem, 3, DEVICE)
    expected = OP.reference(*arguments)
    out = torch.empty_like(expected)
    for side, by in ((0, -1), (0, 1), (1, -1), (1, 1)):
        if window[side] < max(0, -by):
            continue  # all keys, or none to leave out
        wrong = list(arguments)
        wrong[9 + side] = window[side] + by
        launch(CONFIGS[0], wrong, out)
        assert OP.error(problem, arguments, [out], [expected]) > OP.tolerance(problem).limit, (side, by)


def test_examples() -> None:
    for axes in EXAMPLES:
        assert relative_error(axes) < 1, axes


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 385, 641])
def test_a_sequence_of_any_length(length: int) -> None:
    """Tiles and halves of tiles, and one more or less; with and without keys before, of any number."""
    for before in (0, 1, 64, 127, 128, 200):
        context = length + before
        assert relative_error(text((length, 1, length, context, context), 2, 2, lse=True)) < 1, before


@pytest.mark.parametrize("seqs", [40, 512, 700])
def test_many_sequences(seqs: int) -> None:
    """Pieces of work that lie in another group of 32 sequences, and more sequences than are sorted."""
    for config in CONFIGS[:2]:
        assert relative_error(text((seqs * 2, seqs, 150, 200, seqs * 9), 2, 2, lse=True), config) < 1


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_work_in_pairs_and_alone(heads: int) -> None:
    """Batches whose tiles are dealt one by one and in pairs, odd and even numbers of them."""
    for length in (900, 1024, 1300):
        for config in (CONFIGS[0], {"ctas": 7}):
            mix = (length, 1, length, length, length)
            assert relative_error(text(mix, heads, heads, lse=True), config) < 1, (length, config)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (150, 70)], ids=str)
def test_a_row_is_the_same_in_any_batch(window: tuple[int, int]) -> None:
    """Neither the batch, nor how many queries of its own sequence are in it, nor the number of CTAs changes the bits of a row."""
    axes = dict(zip(("window_left", "window_right"), window, strict=True))
    arguments = OP.inputs(OP.problem(text((1100, 7, 500, 900, 3000), 4, 4, **axes)), 1, DEVICE)
    expected = torch.empty(1100, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    launch(CONFIGS[0], arguments, expected)
    begin, rows = arguments[3].tolist(), arguments[4].tolist()
    for index in range(7):
        last = slice(max(begin[index], begin[index + 1] - 37), begin[index + 1])
        for part in (slice(begin[index], begin[index + 1]), last):
            single = list(arguments)
            keys = slice(rows[index], rows[index + 1])
            single[0], single[1], single[2] = arguments[0][part], arguments[1][keys], arguments[2][keys]
            for at, count in ((3, part.stop - part.start), (4, keys.stop - keys.start)):
                single[at] = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
            out = torch.empty_like(expected[part])
            launch(CONFIGS[1], single, out)
            assert torch.equal(out, expected[part]), index


def test_what_is_not_finite_stays_where_it_is_seen() -> None:
    """NaN in a key or value changes nothing for queries that do not see its tile; where it is seen, it shows."""
    length, problem = 300, OP.problem(text((300, 1, 300, 300, 300), 2, 2))
    arguments = OP.inputs(problem, 4, DEVICE)
    expected, out = (torch.empty(length, 2, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    launch(CONFIGS[0], arguments, expected)
    for which in (1, 2):
        spoiled = list(arguments)
        spoiled[which] = arguments[which].clone()
        spoiled[which][170] = float("nan")
        launch(CONFIGS[0], spoiled, out)
        assert torch.equal(out[:128], expected[:128]) and bool(out[170:].isnan().all())


def test_strides() -> None:
    """Parts of wider tensors as they are; rows that do not begin at 16 bytes, and heads in common, in copies."""
    problem = OP.problem(text((200, 3, 90, 150, 300), 4, 4))
    arguments = OP.inputs(problem, 2, DEVICE)
    expected = OP.reference(*arguments)
    out = torch.full((200, 4, 304), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    shifted = list(arguments)
    for at in range(3):
        wide = torch.full((len(arguments[at]), 4, 201), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        shifted[at] = wide[..., 1 : 1 + arguments[at].shape[2]]
        shifted[at].copy_(arguments[at])
    by_head = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in arguments[:3]]
    for given in (arguments, shifted, [*by_head, *arguments[3:]]):
        launch(CONFIGS[0], given, out[..., 16:144])
        assert OP.error(problem, arguments, [out[..., 16:144]], [expected]) < OP.tolerance(problem).limit
    assert bool(out[..., :16].isnan().all() and out[..., 144:].isnan().all())
    shared = list(arguments)
    shared[1], shared[2] = (tensor[:, :1].expand(-1, 4, -1) for tensor in arguments[1:3])
    launch(CONFIGS[0], shared, out[..., 16:144])
    limit = OP.tolerance(problem).limit
    assert OP.error(problem, shared, [out[..., 16:144]], [OP.reference(*shared)]) < limit


def test_scales_of_any_sign() -> None:
    problem = OP.problem(text((200, 3, 90, 150, 300), 4, 4, lse=True))
    for scale in (-0.07, 0.0, 0.3):
        arguments = OP.inputs(problem, 2, DEVICE)
        arguments[7] = scale
        out = torch.empty(200, 4, 128, dtype=torch.bfloat16, device=DEVICE)
        launch(CONFIGS[0], arguments, out)
        lse, arguments[8] = arguments[8], torch.empty_like(arguments[8])
        expected = OP.reference(*arguments)
        error = OP.error(problem, arguments, [out, lse], [expected, arguments[8]])
        assert error < OP.tolerance(problem).limit, scale


def test_lengths_that_change_under_a_graph() -> None:
    """A captured launch reads the lengths when it runs: also none at all, and from pairs of tiles to single ones."""
    problem = OP.problem(text((2000, 4, 2000, 2000, 2500), 16, 16))
    arguments = OP.inputs(problem, 0, DEVICE)
    out = torch.empty(2000, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    launch(CONFIGS[0], arguments, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(CONFIGS[0], arguments, out)
    for queries, contexts in (
        ((2000, 0, 0, 0), (2500, 0, 0, 0)),
        ((0,) * 4, (0,) * 4),
        ((1, 500, 7, 300), (9, 900, 7, 300)),
    ):
        for at, counts in ((3, queries), (4, contexts)):
            arguments[at].copy_(torch.tensor([0, *counts], dtype=torch.int32).cumsum(0))
        used = sum(queries)
        out.fill_(float("nan"))
        graph.replay()
        expected = OP.reference(*arguments)[:used]
        if used:
            limit = OP.tolerance(problem).limit
            assert OP.error(problem, arguments, [out[:used]], [expected]) < limit, queries
        assert bool(out[used:].isnan().all())


def test_many_calls_on_two_streams_are_bitwise_equal() -> None:
    arguments = OP.inputs(OP.problem(text((2000, 5, 900, 1200, 4000), 16, 16)), 1, DEVICE)
    expected = torch.empty(2000, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    launch(CONFIGS[0], arguments, expected)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, kept in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(torch.full_like(expected, float("nan")))
                launch(CONFIGS[0], arguments, kept[-1])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for kept in outs for out in kept)


@pytest.mark.slow
def test_offsets_past_two_to_the_31() -> None:
    """Keys and values of more than 2^31 elements; the last rows count."""
    rows, heads, count = 70_000, 128, 130
    kv = torch.zeros(rows, heads, 320, dtype=torch.bfloat16, device=DEVICE)
    kv[-count:] = torch.randn(count, heads, 320, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(count, heads, 192, device=DEVICE, dtype=torch.bfloat16)
    begin = torch.tensor([0, 0, count], dtype=torch.int32, device=DEVICE)
    context = torch.tensor([0, rows - count, rows], dtype=torch.int32, device=DEVICE)
    arguments = [q, kv[..., :192], kv[..., 192:], begin, context, count, rows, 192**-0.5, None]
    out = torch.empty(count, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    launch(CONFIGS[0], arguments, out)
    problem = OP.problem(text((count, 2, count, rows, rows), heads, heads))
    assert OP.error(problem, arguments, [out], [OP.reference(*arguments)]) < OP.tolerance(problem).limit


def test_a_swapped_pair_of_elements_is_seen() -> None:
    """The tolerance tells keys whose last elements are exchanged, and values of a neighbouring head, from those that are right."""
    problem = OP.problem(text((200, 3, 150, 300, 500), 4, 4))
    arguments = OP.inputs(problem, 3, DEVICE)
    expected = OP.reference(*arguments)
    out = torch.empty(200, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    swapped = arguments[1].clone()
    swapped[..., [126, 190]] = swapped[..., [190, 126]]
    for at, wrong in ((1, swapped), (2, arguments[2].roll(1, 1))):
        given = list(arguments)
        given[at] = wrong
        launch(CONFIGS[0], given, out)
        assert OP.error(problem, arguments, [out], [expected]) > OP.tolerance(problem).limit
