"""The Hopper kernel of paged attention for heads of more than 128 elements, in any batch, against the reference: page sizes, groups,
windows, sinks, soft cap; rows that do not depend on the batch; repeated calls."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.gpu.test_paged_attention_sm90 import (
    CONFIGS,
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
WIDE = (  # q_tokens, seqs, max_q, max_ctx, total_ctx
    *MIXES,
    (300, 2, 250, 900, 1500),
    (103, 24, 80, 9000, 60000),
    (700, 600, 5, 300, 60000),  # more sequences than the kernel sorts
)


@pytest.mark.parametrize(
    ("x", "head_dim", "block_size"),
    [
        *product(("bf16", "fp16"), (192, 256), (8, 16, 24, 64, 256)),
        *(("bf16", 136, 16), ("fp16", 160, 32), ("bf16", 248, 8)),
    ],
)
def test_any_batch(x: str, head_dim: int, block_size: int) -> None:
    for number, mix in enumerate(WIDE):
        for heads, kv_heads in ((4, 1), (6, 2), (3, 3), (16, 1)):
            others: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "x": x}
            others |= {"lse": number % 2 == 0, "sinks": number % 2 == 1, "softcap": number % 3 == 2}
            others |= {"window": (0, 0, 33, 200)[(number + kv_heads) % 4]}
            problem_text = text(mix, heads, kv_heads, **others)
            assert relative_error(problem_text, CONFIGS[number % 3], number) < 1, problem_text


def test_a_row_is_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's result does not depend on the batch, nor on how many CTAs compute the parts of its context."""
    from gristmill.kernels.attention.paged_attention.sm90 import _launch as launchers

    arguments = OP.inputs(OP.problem(text((120, 20, 101, 6000, 40000), 8, 2, head_dim=256)), 1, DEVICE)
    expected = torch.empty_like(arguments[0])
    launch(CONFIGS[0], arguments, scratch(256), expected)
    for units in (0, 30):
        monkeypatch.setitem(launchers.PLACES, "units", units)
        out = torch.full_like(expected, float("nan"))
        launch(CONFIGS[units % 3], arguments, scratch(256), out)
        assert torch.equal(out, expected), units
    monkeypatch.undo()
    begin, contexts = arguments[4].tolist(), arguments[5].tolist()
    for index, context in enumerate(contexts):
        rows = slice(begin[index], begin[index + 1])
        if rows.stop == rows.start:
            continue
        single = list(arguments)
        single[0], single[3] = arguments[0][rows], arguments[3][index : index + 1]
        single[4] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=DEVICE)
        single[5] = torch.tensor([context], dtype=torch.int32, device=DEVICE)
        out = torch.empty_like(single[0])
        launch(CONFIGS[1], single, None, out)
        assert torch.equal(out, expected[rows]), index


def test_many_calls_are_bitwise_equal() -> None:
    arguments = OP.inputs(OP.problem(text((543, 32, 512, 2048, 30000), 8, 2, head_dim=256)), 1, DEVICE)
    expected, space = torch.empty_like(arguments[0]), scratch(256)
    launch(CONFIGS[0], arguments, space, expected)
    for _ in range(30):
        out = torch.full_like(expected, float("nan"))
        launch(CONFIGS[0], arguments, space, out)
        assert torch.equal(out, expected)


def test_a_swapped_pair_of_elements_is_seen() -> None:
    """The tolerance tells heads whose last elements are exchanged from those that are right."""
    problem = OP.problem(text((200, 3, 150, 500, 900), 8, 2, head_dim=256))
    arguments = OP.inputs(problem, 3, DEVICE)
    expected, out = OP.reference(*arguments[:12]), torch.empty_like(arguments[0])
    cache = arguments[1].clone()
    cache[..., [190, 254]] = cache[..., [254, 190]]
    arguments[1] = cache
    launch(CONFIGS[0], arguments, None, out)
    assert OP.error(problem, arguments, [out], [expected]) > OP.tolerance(problem).limit
