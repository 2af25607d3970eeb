"""Paged attention with a soft cap of the scores on Hopper: both kernels against the reference, crossed with dtypes, head sizes, caches,
windows, sinks and LSE; caps of any size; rows that do not depend on the batch; a wrong cap is seen."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

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
LSE, SOFTCAP = 11, 15
CACHES = ({}, {"kv": "fp8", "kv_scale": "head"}, {"kv": "fp8", "kv_scale": "token"})


def features(number: int, x: str, head_dim: int, caches: dict[str, str]) -> dict[str, Any]:
    return {
        "head_dim": head_dim,
        "block_size": (16, 7, 64)[number % 3],
        "x": x,
        "lse": number % 2 == 0,
        "sinks": number % 3 == 1,
        "window": (0, 33, 0, 600)[number % 4],
        "softcap": True,
        **caches,
    }


@pytest.mark.parametrize("caches", CACHES, ids=("x", "head", "token"))
@pytest.mark.parametrize(
    ("x", "head_dim"), [*product(("bf16", "fp16"), (64, 128, 256)), ("bf16", 80), ("fp16", 96), ("bf16", 192)]
)
def test_decode(x: str, head_dim: int, caches: dict[str, str]) -> None:
    for number, mix in enumerate(DECODES):
        rows16 = () if caches or head_dim > 128 else (2 * (9 // mix[2]), 2 * (16 // mix[2]))
        for heads in (6 if number % 2 else 4, *rows16):
            problem_text = text(mix, heads, 2, **features(number, x, head_dim, caches))
            config = {**CONFIGS[number % 3], "ctas": max(CONFIGS[number % 3]["ctas"], 2)}
            assert relative_error(problem_text, config, number, decode=True) < 1, problem_text


@pytest.mark.parametrize("caches", CACHES, ids=("x", "head", "token"))
@pytest.mark.parametrize(
    ("x", "head_dim"), [*product(("bf16", "fp16"), (64, 128)), ("bf16", 80), ("fp16", 96)]
)
def test_any_batch(x: str, head_dim: int, caches: dict[str, str]) -> None:
    for number, mix in enumerate((*MIXES, (300, 2, 250, 900, 1500), (103, 24, 80, 9000, 60000))):
        for heads, kv_heads in ((4, 1), (6, 2)):
            problem_text = text(mix, heads, kv_heads, **features(number + kv_heads, x, head_dim, caches))
            assert relative_error(problem_text, CONFIGS[number % 3], number) < 1, problem_text


def one(
    mix: tuple[int, ...], decode: bool, softcap: float, given: float, **others: Any
) -> tuple[float, torch.Tensor]:
    """Returns the error of a launch with the cap `given` against the reference with `softcap`, relative to the tolerance; the result."""
    problem = OP.problem(text(mix, 8, 2, softcap=True, lse=True, **others))
    arguments = OP.inputs(problem, 1, DEVICE)
    reference, arguments[SOFTCAP] = list(arguments), given
    reference[SOFTCAP], reference[LSE] = softcap, torch.empty_like(arguments[LSE])
    out = torch.full_like(arguments[0].contiguous(), float("nan"))
    launch(CONFIGS[0], arguments, scratch(out.shape[2]), out, decode)
    outputs, expected = [out, arguments[LSE]], [OP.reference(*reference), reference[LSE]]
    return OP.error(problem, arguments, outputs, expected) / OP.tolerance(problem).limit, out


@pytest.mark.parametrize("caches", CACHES, ids=("x", "head", "token"))
@pytest.mark.parametrize(
    ("mix", "decode"), [((6, 7, 1, 3000, 9000), True), ((333, 5, 150, 700, 2000), False)]
)
def test_caps_of_any_size(mix: tuple[int, ...], decode: bool, caches: dict[str, str]) -> None:
    """Far under the scores, as of Gemma 2, and so large that it changes nothing; another cap is seen."""
    for softcap in (0.05, 2.5, 30.0, 50.0, 1e6):
        assert one(mix, decode, softcap, softcap, **caches)[0] < 1, softcap
    assert one(mix, decode, 0.0, 1e6, **caches)[0] < 1
    assert one(mix, decode, 2.5, 2.6, **caches)[0] > 1
    assert one(mix, decode, 2.5, 0.0, **caches)[0] > 1


def test_a_row_is_the_same_in_any_batch() -> None:
    arguments = OP.inputs(OP.problem(text((120, 20, 101, 6000, 40000), 8, 2, softcap=True)), 1, DEVICE)
    expected = torch.empty_like(arguments[0].contiguous())
    launch(CONFIGS[0], arguments, scratch(), expected)
    begin = arguments[4].tolist()
    for index in range(len(begin) - 1):
        rows = slice(begin[index], begin[index + 1])
        if rows.start == rows.stop:
            continue
        single = list(arguments)
        single[0], single[3] = arguments[0][rows], arguments[3][index : index + 1]
        single[4] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=DEVICE)
        single[5] = arguments[5][index : index + 1].clone()
        out = torch.empty_like(expected[rows])
        launch(CONFIGS[1], single, None, out)
        assert torch.equal(out, expected[rows]), index
