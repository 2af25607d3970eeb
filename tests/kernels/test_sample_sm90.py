"""sample on Hopper without a GPU: the configuration follows the rows that the device has room for, and holds against times of an H200."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.sampling.sample_sm90 import KERNEL, MOST_OF_SLICE, Choice, microseconds, resident

OP, H200 = default_registry().op("sample"), Target.parse("h200")
TIMES = {
    20: {
        (8, 512): (102.55, 84.0),
        (4, 512): (143.0, 111.09),
        (2, 512): (237.14, None),
        (8, 256): (150.5, 120.02),
        (4, 256): (233.02, 173.96),
        (8, 128): (256.17, 199.25),
        (1, 512): (421.94, None),
    },
    200: {
        (8, 512): (305.57, 326.04),
        (4, 512): (286.3, 267.29),
        (2, 512): (305.33, None),
        (8, 256): (292.23, 274.65),
        (4, 256): (311.94, 403.62),
        (8, 128): (354.45, 430.47),
        (1, 512): (488.99, None),
    },
}
"""Rows of 152,064 tokens -> ranks and threads -> microseconds on an H200 with logits that are read again and that are kept."""


def chosen(m: int, v: int, target: Target = H200) -> Choice:
    return Choice(
        **{name: int(value) for name, value in KERNEL.config(OP.problem(f"m={m},v={v}"), target).items()}
    )


def test_expected_times_are_those_measured() -> None:
    """What a wave after the first one adds is that of rows that differ less than the measured ones: of those in one wave, the time."""
    problem = OP.problem("m=20,v=152064")
    for (ranks, threads), times in TIMES[20].items():
        for keep, us in enumerate(times):
            if us is not None:
                assert microseconds(problem, H200, Choice(ranks, threads, keep)) == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize(("m", "most"), [(20, 1.02), (200, 1.08)])
def test_the_choice_is_near_the_fastest(m: int, most: float) -> None:
    """Whole clusters of few threads at 20 rows took 1.43 times the best, pairs at 200 rows 1.14 times."""
    one = chosen(m, 152064)
    us = TIMES[m][one.ranks, one.threads][one.keep]
    assert us is not None and us <= most * min(
        us for pair in TIMES[m].values() for us in pair if us is not None
    )


def test_more_rows_get_fewer_blocks_each_and_read_again() -> None:
    """By the waves that they take: a device with half the multiprocessors changes at half the rows."""
    half = replace(H200, multiprocessors=66)
    for v in (32000, 50304, 128256, 152064, 262144):
        rows = [*range(1, 300), 512, 1024]
        every = [chosen(m, v) for m in rows]
        assert every[0] == (8, 512, 1) and every[-1] == (2, 512, 0)
        assert [one.ranks for one in every] == sorted((one.ranks for one in every), reverse=True)
        assert [one.keep for one in every] == sorted((one.keep for one in every), reverse=True)
        assert [chosen(m, v, half) for m in rows[:150]] == [chosen(2 * m, v) for m in rows[:150]]
    assert chosen(16, 152064) == (8, 512, 1), "one wave of 16 clusters of eight blocks"


@pytest.mark.parametrize("v", [1, 64, 700, 2048, 2049, 4097, 8193, 51200, 409600, 409601, 1 << 24])
def test_every_vocabulary_has_a_choice_that_runs(v: int) -> None:
    for m in (0, 1, 33, 4096):
        one = chosen(m, v)
        assert one.ranks in (1, 2, 4, 8) and one.threads in (64, 128, 512) and resident(v, one) >= 1
        assert not one.keep or -(-v // one.ranks) <= MOST_OF_SLICE
    if v <= 2048:
        assert chosen(1, v).ranks == 1
