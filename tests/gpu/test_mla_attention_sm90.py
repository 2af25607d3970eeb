"""MLA on Hopper against the reference: page sizes, numbers of heads and of new tokens, lengths at edges,
split contexts, graphs, repeated calls, streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.mla_attention.sm90.spec import COUNTER_BYTES, EXAMPLES, PART_BYTES
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("mla_attention")
CUT = {"ctas": 132, "least": 1, "slack": 0}
CONFIGS = (
    CUT,
    {"ctas": 132, "least": 2, "slack": 4},
    {"ctas": 6, "least": 1, "slack": 0},
    {"ctas": 132, "least": 1, "slack": -1},
    {"ctas": 2, "least": 1, "slack": 0},
)
MIXES = (  # q_tokens, seqs, max_q, max_ctx, total_ctx
    (1, 1, 1, 1, 1),
    (1, 1, 1, 700, 700),
    (5, 7, 1, 300, 900),
    (9, 4, 4, 257, 700),
    (67, 5, 33, 190, 600),
)


def text(mix: tuple[int, ...], heads: int, **others: Any) -> str:
    axes = dict(zip(("q_tokens", "seqs", "max_q", "max_ctx", "total_ctx"), mix, strict=True))
    return ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in {**axes, "heads": heads, **others}.items()
    )


def launch(config: dict[str, int], arguments: list[Any], workspace: Any, out: torch.Tensor) -> None:
    from gristmill.kernels.attention.mla_attention.sm90._launch import launch

    launch(config, make_call("mla_attention", *arguments[:10], workspace, out))


def workspace(config: dict[str, int]) -> torch.Tensor:
    """Returns a workspace with counters of zero and partial results of NaN, so that a part that is read but
    never written shows."""
    space = torch.full(
        (COUNTER_BYTES + 2 * config["ctas"] * PART_BYTES,), 255, dtype=torch.uint8, device=DEVICE
    )
    space[:COUNTER_BYTES] = 0
    return space


def relative_error(problem_text: str, config: dict[str, int] = CUT, seed: int = 0) -> float:
    """Returns the error of one call relative to the tolerance.

    The call writes into the middle of a poisoned buffer. Everything around the result stays untouched, and a
    second call gives the same bits.
    """
    problem = OP.problem(problem_text)
    arguments = OP.inputs(problem, seed, DEVICE)
    q, begin, lse = arguments[0], arguments[3], arguments[9]
    used, space = int(begin[-1]), workspace(config)
    outs = []
    for _ in range(2):
        buffer = torch.full((q.shape[0] + 2, q.shape[1], 512), float("nan"), dtype=q.dtype, device=DEVICE)
        launch(config, arguments, space, buffer[1:-1])
        assert bool(buffer[0].isnan().all() and buffer[-1].isnan().all()), "wrote outside of out"
        outs.append(buffer[1 : used + 1])
    assert torch.equal(*outs), "two calls differ"
    assert not bool(space[:COUNTER_BYTES].any()), "counters are left"
    outputs, reference = [outs[0]], list(arguments)
    if lse is not None:
        outputs.append(lse[:used].clone())
        reference[9] = torch.empty_like(lse)
    expected = [OP.reference(*reference[:10])[:used]]
    if lse is not None:
        expected.append(reference[9][:used])
    return OP.error(problem, arguments, outputs, expected) / OP.tolerance(problem).limit


@pytest.mark.parametrize("block_size", [1, 7, 8, 16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_pages_and_heads(heads: int, block_size: int) -> None:
    for number, mix in enumerate(MIXES):
        config = CONFIGS[(number + heads // 8 + block_size) % len(CONFIGS)]
        problem_text = text(
            mix, heads, block_size=block_size, x="fp16" if number == 2 else "bf16", lse=number % 2 == 0
        )
        assert relative_error(problem_text, config, number) < 1, (problem_text, config)


@pytest.mark.parametrize("heads", [1, 7, 20, 65, 96, 127])
def test_odd_numbers_of_heads(heads: int) -> None:
    for number, mix in enumerate(MIXES):
        config = CONFIGS[(number + heads) % len(CONFIGS)]
        assert relative_error(text(mix, heads, lse=True), config, number) < 1, (mix, config)


@pytest.mark.parametrize("max_q", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_new_tokens(heads: int, max_q: int) -> None:
    for number, config in enumerate(CONFIGS):
        problem_text = text(
            (5 * max_q, 5, max_q, 900, 2500), heads, block_size=(64, 16)[number % 2], lse=True
        )
        assert relative_error(problem_text, config, number) < 1, config


@pytest.mark.parametrize(
    "context", [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1023, 1024, 1025]
)
def test_lengths_at_edges(context: int) -> None:
    for number, config in enumerate(CONFIGS):
        for heads in (16, 128):
            problem_text = text(
                (1, 1, 1, context, context), heads, block_size=(64, 8, 32)[number % 3], lse=True
            )
            assert relative_error(problem_text, config, number) < 1, (heads, config)


@pytest.mark.parametrize(
    "problem_text",
    [
        *EXAMPLES,
        text((0, 1, 1, 1, 0), 16),
        text((3, 6, 1, 37, 150), 128),  # some sequences have no new tokens
        text((700, 700, 1, 200, 60000), 16),
        text((700, 600, 5, 300, 60000), 8),
        text((257, 1, 257, 257, 257), 16, lse=True),
        text((300, 3, 200, 1500, 2500), 40, lse=True),
        text((1, 1, 1, 20000, 20000), 16, lse=True),
        text((1, 1, 1, 20000, 20000), 128, lse=True),
        text((133, 133, 1, 640, 70000), 16, lse=True),
        text((67, 67, 1, 640, 30000), 128, lse=True),
    ],
)
def test_shapes(problem_text: str) -> None:
    for config in CONFIGS[:4]:
        assert relative_error(problem_text, config) < 1, config


@pytest.mark.parametrize("scale", [-0.05, 0.0, 0.3])
def test_scales(scale: float) -> None:
    problem = OP.problem(text((9, 3, 4, 500, 900), 16))
    arguments = OP.inputs(problem, 3, DEVICE)
    arguments[7] = scale
    out = torch.empty(9, 16, 512, dtype=torch.bfloat16, device=DEVICE)
    launch(CUT, arguments, None, out)
    error = OP.error(problem, arguments, [out], [OP.reference(*arguments[:10])])
    assert error < OP.tolerance(problem).limit


def test_strides() -> None:
    """The cache holds several layers side by side; q and out are columns of larger tensors."""
    problem = OP.problem(text((9, 3, 4, 500, 900), 16, block_size=16))
    arguments = OP.inputs(problem, 3, DEVICE)
    q, cache = arguments[0], arguments[1]
    expected = OP.reference(*arguments[:10])
    layers = torch.full((cache.shape[0], 3, 16, 576), float("nan"), dtype=q.dtype, device=DEVICE)
    layers[:, 1] = cache
    columns = torch.full((9, 16, 640), float("nan"), dtype=q.dtype, device=DEVICE)
    columns[..., 64:] = q
    arguments[0], arguments[1] = columns[..., 64:], layers[:, 1]
    out = torch.full((9, 20, 1024), float("nan"), dtype=q.dtype, device=DEVICE)
    launch(CUT, arguments, None, out[:, 2:18, 512:])
    assert OP.error(problem, arguments, [out[:, 2:18, 512:]], [expected]) < OP.tolerance(problem).limit
    assert bool(out[:, :2].isnan().all() and out[:, 18:].isnan().all() and out[..., :512].isnan().all())
    arguments[0] = torch.empty(9, 32, 576, dtype=q.dtype, device=DEVICE)[:, ::2].copy_(q)  # a copy
    launch(CUT, arguments, None, out[:, 2:18, 512:])
    assert OP.error(problem, arguments, [out[:, 2:18, 512:]], [expected]) < OP.tolerance(problem).limit


def test_caches_off_alignment_are_refused() -> None:
    arguments = OP.inputs(OP.problem(text((4, 4, 1, 64, 200), 16)), 0, DEVICE)
    cache = arguments[1]
    arguments[1] = torch.zeros(cache.numel() + 1, dtype=cache.dtype, device=DEVICE)[1:].view(cache.shape)
    with pytest.raises(ValueError, match="mla_attention_sm90"):
        launch(CUT, arguments, None, torch.empty(4, 16, 512, dtype=torch.bfloat16, device=DEVICE))


def test_offsets_past_2_31() -> None:
    """The sequences lie in the last pages of a cache of 2^32 elements."""
    problem = OP.problem(text((3, 3, 1, 300, 700), 16, lse=True))
    arguments = OP.inputs(problem, 0, DEVICE)
    small = arguments[1]
    expected = OP.reference(*arguments[:10])
    for block_size in (64, 1):
        blocks = (1 << 32) // (block_size * 576) + 1
        large = torch.empty(blocks, block_size, 576, dtype=small.dtype, device=DEVICE)
        view, table = small.view(-1, block_size, 576), arguments[2]
        shift = blocks - view.shape[0]
        large[shift:] = view
        shifted = list(arguments)
        per = 64 // block_size
        blocks_of_seqs = (table.long()[:, :, None] * per + torch.arange(per, device=DEVICE)).flatten(
            1
        ) + shift
        shifted[1], shifted[2] = large, blocks_of_seqs.clamp(max=2**30).int()
        out = torch.empty_like(expected)
        launch(CUT, shifted, None, out)
        assert OP.error(problem, shifted, [out], [expected]) < OP.tolerance(problem).limit
        del large


@pytest.mark.parametrize(("heads", "max_q"), [(16, 1), (128, 2)])
def test_lengths_change_under_a_graph(heads: int, max_q: int) -> None:
    problem = OP.problem(text((12, 12, max_q, 900, 4000), heads))
    arguments = OP.inputs(problem, 0, DEVICE)
    cache = arguments[1]  # with room for every division of the contexts into pages
    arguments[1] = torch.full(
        (cache.shape[0] + 13, *cache.shape[1:]), float("nan"), dtype=cache.dtype, device=DEVICE
    )
    space = workspace(CUT)
    out = torch.empty(12, heads, 512, dtype=cache.dtype, device=DEVICE)
    launch(CUT, arguments, space, out)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(CUT, arguments, space, out)
    seen = set()
    for seed in range(1, 8):
        new = OP.inputs(problem, seed, DEVICE)
        for index in (0, 2, 3, 4):
            arguments[index].copy_(new[index])
        arguments[1].fill_(float("nan"))
        arguments[1][: new[1].shape[0]] = new[1]
        graph.replay()
        error = OP.error(problem, arguments, [out], [OP.reference(*arguments[:10])])
        assert error < OP.tolerance(problem).limit, seed
        seen.add(tuple(arguments[4].tolist()))
    assert len(seen) > 1


def test_a_row_is_the_same_in_any_batch() -> None:
    unsplit = {**CUT, "slack": -1}
    problem = OP.problem(text((33, 5, 15, 700, 2000), 40))
    arguments = OP.inputs(problem, 1, DEVICE)
    expected = torch.empty(33, 40, 512, dtype=torch.bfloat16, device=DEVICE)
    launch(unsplit, arguments, None, expected)
    begin, contexts = arguments[3].tolist(), arguments[4].tolist()
    for index, context in enumerate(contexts):
        rows = slice(begin[index], begin[index + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        single = list(arguments)
        single[0], single[2] = arguments[0][rows], arguments[2][index : index + 1]
        single[3] = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        single[4] = torch.tensor([context], dtype=torch.int32, device=DEVICE)
        single[5] = count
        out = torch.empty_like(expected[rows])
        launch({**unsplit, "ctas": 4}, single, None, out)
        assert torch.equal(out, expected[rows]), index


@pytest.mark.parametrize("heads", [16, 128])
def test_many_calls_are_bitwise_equal_on_two_streams(heads: int) -> None:
    problem = OP.problem(text((12, 12, 1, 2048, 9000), heads))
    arguments = OP.inputs(problem, 1, DEVICE)
    expected = torch.empty(12, heads, 512, dtype=torch.bfloat16, device=DEVICE)
    launch(CUT, arguments, None, expected)
    torch.cuda.synchronize()
    outs = []
    for _ in range(2):
        stream, space = torch.cuda.Stream(), workspace(CUT)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(100):
                out = torch.empty_like(expected)
                launch(CUT, arguments, space, out)
                outs.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
