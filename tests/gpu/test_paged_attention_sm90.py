"""Paged attention on Hopper against the reference: page sizes, GQA groups, windows, mixed batches, lengths
that change under a graph, repeated calls, streams."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.paged_attention.sm90.spec import COUNTER_BYTES, EXAMPLES, parts_bytes
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("paged_attention")
CONFIGS = (
    {"ctas": 132, "reading": 10, "prompt_rows": 128, "part_tiles": 8},
    {"ctas": 3, "reading": 10, "prompt_rows": 128, "part_tiles": 8},
    {"ctas": 1, "reading": 10, "prompt_rows": 128, "part_tiles": 8},
)
MIXES = (  # q_tokens, seqs, max_q, max_ctx, total_ctx
    (5, 5, 1, 300, 800),
    (67, 7, 33, 257, 900),
    (260, 3, 200, 511, 900),
    (3, 6, 2, 37, 150),
    (128, 1, 128, 128, 128),
)


def text(mix: tuple[int, ...], heads: int, kv_heads: int, **others: Any) -> str:
    axes = dict(zip(("q_tokens", "seqs", "max_q", "max_ctx", "total_ctx"), mix, strict=True))
    return ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in {**axes, "heads": heads, "kv_heads": kv_heads, **others}.items()
    )


def launch(
    config: dict[str, int], arguments: list[Any], workspace: Any, out: torch.Tensor, decode: bool = False
) -> None:
    from gristmill.kernels.attention.paged_attention.sm90 import _launch as launchers

    launchers.launch(
        config, make_call("paged_attention", *arguments[:12], workspace, *arguments[13:], out), decode=decode
    )


def scratch(head_dim: int = 128) -> torch.Tensor:
    """Returns a workspace for CONFIGS: counters of zero, and partial results of NaN, so that a part that is
    read but never written shows."""
    space = torch.full((COUNTER_BYTES + parts_bytes(head_dim, 132),), 0xFF, dtype=torch.uint8, device=DEVICE)
    space[:COUNTER_BYTES] = 0
    return space


def relative_error(
    problem_text: str, config: dict[str, int] = CONFIGS[0], seed: int = 0, decode: bool = False
) -> float:
    """Returns the error of one call relative to the tolerance.

    The call writes into the middle of a poisoned buffer. Everything around the result stays untouched, and a
    second call gives the same bits.
    """
    problem = OP.problem(problem_text)
    arguments = OP.inputs(problem, seed, DEVICE)
    q, begin, lse = arguments[0], arguments[4], arguments[11]
    used, space = int(begin[-1]), scratch(q.shape[2])
    results = []
    for _ in range(2):
        buffer = torch.full((q.shape[0] + 2, *q.shape[1:]), float("nan"), dtype=q.dtype, device=DEVICE)
        launch(config, arguments, space, buffer[1:-1], decode)
        assert bool(buffer[0].isnan().all() and buffer[-1].isnan().all()), "wrote outside of out"
        results.append(buffer[1 : used + 1])
    assert torch.equal(*results), "two calls differ"
    assert not bool(space[:COUNTER_BYTES].any()), "counters are left"
    outputs, expected = [results[0]], [None]
    reference = list(arguments)
    if lse is not None:
        outputs.append(lse[:used].clone())
        reference[11] = torch.empty_like(lse)
    expected = [OP.reference(*reference)[:used]]
    if lse is not None:
        expected.append(reference[11][:used])
    return OP.error(problem, arguments, outputs, expected) / OP.tolerance(problem).limit


DECODES = (  # q_tokens, seqs, max_q, max_ctx, total_ctx
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1000, 1000),
    (5, 5, 1, 300, 800),
    (3, 6, 2, 37, 150),
    (19, 10, 2, 3000, 9000),
    (64, 64, 1, 900, 20000),
    (2, 2, 1, 20000, 25000),
    (300, 300, 1, 40, 5000),
)


@pytest.mark.parametrize(
    ("x", "head_dim", "block_size"),
    [
        *product(("bf16", "fp16"), (64, 128), (1, 7, 16, 24, 256)),
        *(("bf16", 80, 16), ("fp16", 80, 1), ("fp16", 96, 7), ("bf16", 96, 256)),
        *(("bf16", 192, 1), ("fp16", 192, 16), ("bf16", 256, 24), ("fp16", 256, 256)),
    ],
)
def test_decode(x: str, head_dim: int, block_size: int) -> None:
    for number, mix in enumerate(DECODES):
        wide = ((16 // mix[2], 1), (2 * (9 // mix[2]), 2)) if head_dim <= 128 else ()
        for heads, kv_heads in ((4, 1), (6, 2), (3, 3), (1, 1), (8 // mix[2], 1), *wide):
            others: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "x": x}
            others |= {
                "lse": number % 2 == 0,
                "sinks": number % 3 == 1,
                "window": (0, 0, 33, 600)[number % 4],
            }
            problem_text = text(mix, heads, kv_heads, **others)
            config = CONFIGS[number % 3]
            config = {**config, "ctas": max(config["ctas"], kv_heads)}  # the kernel needs one CTA per KV head
            for warps in (0, 4, 8):
                found = relative_error(problem_text, {**config, "cta_warps": warps}, number, decode=True)
                assert found < 1, (problem_text, warps)


def test_decode_of_no_keys_is_zero() -> None:
    arguments = OP.inputs(OP.problem(text((2, 2, 1, 20, 30), 4, 1)), 0, DEVICE)
    arguments[5][0] = 0
    for decode in (False, True):
        out = torch.full_like(arguments[0].contiguous(), float("nan"))
        launch(CONFIGS[0], arguments, scratch(), out, decode)
        assert not bool(out[0].any()) and bool(out[1].isfinite().all())


@pytest.mark.parametrize(
    ("x", "head_dim", "block_size"),
    [
        *product(("bf16", "fp16"), (64, 128), (1, 7, 8, 16, 24, 32, 64, 256)),
        *(("bf16", 40, 8), ("fp16", 40, 7), ("bf16", 80, 16), ("fp16", 80, 1)),
        *(("bf16", 96, 64), ("fp16", 96, 24), ("bf16", 112, 256), ("fp16", 120, 16)),
    ],
)
def test_pages(x: str, head_dim: int, block_size: int) -> None:
    for number, mix in enumerate(MIXES):
        for heads, kv_heads in ((4, 1), (6, 2), (3, 3)):
            config = CONFIGS[number % 3]
            problem_text = text(
                mix,
                heads,
                kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                x=x,
                lse=number % 2 == 0,
                sinks=number % 2 == 1,
            )
            assert relative_error(problem_text, config, number) < 1, problem_text


@pytest.mark.parametrize("window", [1, 9, 64, 128, 130, 500])
def test_windows(window: int) -> None:
    for number, mix in enumerate((*MIXES, (300, 2, 250, 900, 1500))):
        for heads, kv_heads in ((8, 8), (4, 1), (16, 1)):
            problem_text = text(mix, heads, kv_heads, window=window, lse=True, sinks=number % 2 == 0)
            assert relative_error(problem_text, CONFIGS[number % 3], number) < 1, problem_text


@pytest.mark.parametrize(
    "given",
    [
        *EXAMPLES,
        text((0, 1, 1, 1, 0), 2, 2),
        text((1, 1, 1, 1, 1), 4, 1, lse=True),
        text((7, 1, 7, 7, 7), 4, 1),
        text((257, 1, 257, 257, 257), 4, 2, lse=True),
        text((100, 4, 40, 900, 2000), 128, 1, head_dim=64, lse=True),
        text((700, 600, 5, 300, 60000), 2, 1),  # more sequences than the kernel sorts
        text((513, 513, 1, 64, 20000), 2, 1),
        text((512, 512, 1, 64, 20000), 2, 1),
        text((1024, 1, 1024, 4096, 4096), 4, 1, lse=True),
        text((543, 32, 512, 2048, 40000), 8, 2, lse=True),  # one prefill and many decodes
    ],
)
def test_shapes(given: str) -> None:
    assert relative_error(given) < 1


PROMPTS = (  # at least half of the longest one's tokens on average
    (1, 1, 1, 1, 1),
    (7, 1, 7, 7, 7),
    (257, 1, 257, 257, 257),
    (260, 3, 129, 511, 900),
    (128, 1, 128, 4000, 4000),
    (1024, 4, 400, 900, 2000),
    (700, 1, 700, 1300, 1300),
    (400, 2, 250, 2600, 5000),
)
"""The last four have contexts of several tiles without masks, which kernels take in pairs."""


def prompt_outputs(problem_text: str, config: dict[str, int], seed: int) -> list[torch.Tensor]:
    """Returns the rows that a call with tiles of 128 rows writes, and one that allows 192."""
    arguments = OP.inputs(OP.problem(problem_text), seed, DEVICE)
    used, outputs = int(arguments[4][-1]), []
    for rows in (128, 192):
        out = torch.full_like(arguments[0].contiguous(), float("nan"))
        launch({**config, "prompt_rows": rows}, arguments, scratch(arguments[0].shape[2]), out)
        outputs.append(out[:used])
    return outputs


@pytest.mark.parametrize(
    ("x", "head_dim", "block_size"), [("bf16", 64, 8), ("fp16", 64, 256), ("fp16", 40, 64), ("bf16", 48, 16)]
)
def test_three_warpgroups(x: str, head_dim: int, block_size: int) -> None:
    """Batches of prompts in tiles of 192 rows give the bits of tiles of 128. Of groups of 48 and 128 heads only these are compared:
    windows of 33 keys of heads of 48, and of 130 of heads of 96, are 0.5 and 8% over the tolerance there, in either tiles."""
    groups = ((4, 1), (6, 2), (2, 2), (7, 1), (48, 1), (128, 1))
    for number, (mix, (heads, kv_heads)) in enumerate(product(PROMPTS, groups)):
        shape = {"head_dim": head_dim, "block_size": block_size, "x": x}
        more = {"lse": number % 2 == 0, "sinks": number % 3 == 0, "window": (0, 33, 0, 130, 600)[number % 5]}
        problem_text = text(mix, heads, kv_heads, **shape, **more)
        whole = {**CONFIGS[number % 3], "part_tiles": 0}
        error = relative_error(problem_text, {**whole, "prompt_rows": 192}, number)
        assert error < 1 or heads // kv_heads >= 48, problem_text
        assert torch.equal(*prompt_outputs(problem_text, whole, number)), problem_text


@pytest.mark.parametrize(
    "others",
    [{"head_dim": 96}, {"head_dim": 128}, {"head_dim": 64, "block_size": 7}, {"softcap": True}],
    ids=str,
)
def test_other_prompts_have_two_warpgroups(others: dict[str, Any]) -> None:
    """`prompt_rows` changes nothing for larger heads, pages by rows and soft caps."""
    for number, mix in enumerate(PROMPTS):
        problem_text = text(mix, 4, 1, **{"head_dim": 64, **others})
        assert torch.equal(*prompt_outputs(problem_text, CONFIGS[number % 3], number)), problem_text


@pytest.mark.parametrize("scale", [-0.05, 0.0, 0.3])
def test_scales(scale: float) -> None:
    problem = OP.problem(text((200, 3, 150, 500, 900), 8, 2))
    arguments = OP.inputs(problem, 3, DEVICE)
    arguments[8] = scale
    out = torch.empty_like(arguments[0])
    launch(CONFIGS[0], arguments, None, out)
    error = OP.error(problem, arguments, [out], [OP.reference(*arguments[:12])])
    assert error < OP.tolerance(problem).limit


@pytest.mark.parametrize(
    ("mix", "decode"),
    [((200, 3, 150, 500, 900), False), ((6, 7, 1, 3000, 9000), False), ((6, 7, 1, 3000, 9000), True)],
)
def test_lengths_change_under_a_graph(mix: tuple[int, ...], decode: bool) -> None:
    problem = OP.problem(text(mix, 8, 2))
    arguments = OP.inputs(problem, 0, DEVICE)
    # Leave room for every division of the contexts into pages.
    for index in (1, 2):
        cache = arguments[index]
        arguments[index] = torch.full(
            (cache.shape[0] + 4, *cache.shape[1:]), float("nan"), dtype=cache.dtype, device=DEVICE
        )
    space, out, seen = scratch(), torch.empty_like(arguments[0]), set()
    arguments[0] = arguments[0].contiguous()
    launch(CONFIGS[0], arguments, space, out, decode)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(CONFIGS[0], arguments, space, out, decode)
    for seed in range(1, 6):
        new = OP.inputs(problem, seed, DEVICE)
        for index in (0, 3, 4, 5):
            arguments[index].copy_(new[index])
        for index in (1, 2):
            arguments[index].fill_(float("nan"))
            arguments[index][: new[index].shape[0]] = new[index]
        graph.replay()
        error = OP.error(problem, arguments, [out], [OP.reference(*arguments[:12])])
        assert error < OP.tolerance(problem).limit, seed
        seen.add(tuple(arguments[5].tolist()))
    assert len(seen) > 1


def test_a_row_is_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's result does not depend on the batch, nor on how many CTAs compute the parts of its context."""
    from gristmill.kernels.attention.paged_attention.sm90 import _launch as launchers

    for mix in ((333, 5, 150, 700, 2000), (120, 20, 101, 6000, 40000)):
        arguments = OP.inputs(OP.problem(text(mix, 8, 2)), 1, DEVICE)
        expected = torch.empty_like(arguments[0])
        launch(CONFIGS[0], arguments, scratch(), expected)
        for units in (0, 30):
            monkeypatch.setitem(launchers.PLACES, "units", units)
            out = torch.full_like(expected, float("nan"))
            launch(CONFIGS[units % 3], arguments, scratch(), out)
            assert torch.equal(out, expected), units
        monkeypatch.undo()
        begin, contexts = arguments[4].tolist(), arguments[5].tolist()
        for index, context in enumerate(contexts):
            rows = slice(begin[index], begin[index + 1])
            count = rows.stop - rows.start
            if count == 0:
                continue
            single = list(arguments)
            single[0], single[3] = arguments[0][rows], arguments[3][index : index + 1]
            single[4] = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
            single[5] = torch.tensor([context], dtype=torch.int32, device=DEVICE)
            out = torch.empty_like(single[0])
            launch(CONFIGS[1], single, None, out)
            assert torch.equal(out, expected[rows]), index


@pytest.mark.parametrize(
    "mix", [(543, 32, 512, 2048, 30000), (103, 24, 80, 9000, 60000), (13, 13, 1, 5000, 30000)]
)
def test_many_calls_are_bitwise_equal_on_two_streams(mix: tuple[int, ...]) -> None:
    decode = mix[2] == 1
    arguments = OP.inputs(OP.problem(text(mix, 8, 2)), 1, DEVICE)
    expected = torch.empty_like(arguments[0])
    launch(CONFIGS[0], arguments, None, expected, decode)
    torch.cuda.synchronize()
    outs = []
    for _ in range(2):
        stream, space = torch.cuda.Stream(), scratch()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(50):
                out = torch.empty_like(expected)
                launch(CONFIGS[0], arguments, space, out, decode)
                outs.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_caches_off_alignment_are_refused() -> None:
    arguments = OP.inputs(OP.problem(text((64, 1, 64, 64, 64), 4, 1)), 0, DEVICE)
    cache = arguments[1]
    shifted = torch.zeros(cache.numel() + 1, dtype=cache.dtype, device=DEVICE)[1:].view(cache.shape)
    arguments[1] = shifted
    with pytest.raises(ValueError, match="paged_attention_sm90"):
        launch(CONFIGS[0], arguments, None, torch.empty_like(arguments[0]))
