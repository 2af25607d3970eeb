"""Weights of scores under a small soft cap in prompts on Hopper, executed on the CPU: `_bounded_weights_sm90.cuh` as C++, four lanes of
two rows, beside float64."""

from __future__ import annotations

import ctypes
import shutil
from math import e, floor, log2
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
SCALE = 0.125
CAPS = (0.05, 2.5, 30.0, 50.0, 64.0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("bounded_weights") / "bounded_weights.so"
    flags = ["-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init"]
    return compiled_library.load(out, ROOT / "tests/native/bounded_weights_fibers.cpp", flags=flags)


class Tile(NamedTuple):
    """Weights [2, keys] in float32, and sums [2] of what they were before they were rounded, and of themselves."""

    weights: Tensor
    sums: Tensor
    rounded: Tensor


def weigh(
    library: ctypes.CDLL, scores: Tensor, cap: float, visible: list[tuple[int, int]] | None = None
) -> Tile:
    """scores: [2, keys] of a tile, 64 or 128 keys. visible: first and end of the keys that a row sees, of both rows; None: all."""
    keys = scores.shape[1]
    entry = library[f"weights_of_{keys // 2}"]
    entry.restype = ctypes.c_float
    places = torch.arange(keys // 2)
    row, column = places >> 1 & 1, (places >> 2) * 8 + (places & 1)
    weights, sums = torch.full((2, keys), float("nan")), torch.zeros(4)
    for lane in range(4):
        given, words, added = (
            scores[row, column + lane * 2].contiguous(),
            torch.zeros(keys // 4, dtype=torch.int32),
            torch.zeros(4),
        )
        bounds = torch.tensor(visible or [(0, keys)] * 2, dtype=torch.int32).T.contiguous() - lane * 2
        some = entry(
            ctypes.c_float(cap),
            ctypes.c_float(SCALE),
            int(visible is not None),
            *(ctypes.c_void_p(t.data_ptr()) for t in (given, bounds[0], bounds[1], words, added)),
        )
        assert not some < 0  # the kernel's loop would take it for an arrival
        weights[row, column + lane * 2] = words.view(torch.bfloat16).float()
        sums += added
    return Tile(weights, sums[:2], sums[2:])


def drawn(keys: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(2, keys, generator=torch.Generator().manual_seed(seed)) * spread


def unit(cap: float) -> float:
    """The factor of all weights, by which the largest one, of a score at the cap, is a power of two."""
    bits = cap * log2(e)
    return float(2 ** (floor(bits) - bits))


def check(tile: Tile, scores: Tensor, cap: float, seen: Tensor) -> None:
    """seen: [2, keys], which keys count."""
    exact = (torch.exp(cap * torch.tanh(scores.double() * SCALE / cap)) * unit(cap)).where(seen, 0.0)
    assert bool(((tile.weights - exact).abs() <= exact * (2**-8 + 1e-4)).all())
    assert torch.allclose(tile.sums.double(), exact.sum(1), rtol=1e-4, atol=0)
    assert torch.allclose(tile.rounded.double(), tile.weights.double().sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("cap", CAPS)
def test_weights(library: ctypes.CDLL, cap: float, keys: int) -> None:
    """Of scores far below the cap and far above it."""
    assert library.is_small(ctypes.c_float(cap))
    for spread in (1.0, 100.0, 1e5):
        scores = drawn(keys, spread, int(spread))
        check(weigh(library, scores, cap), scores, cap, torch.ones(2, keys, dtype=torch.bool))


def test_the_largest_and_the_smallest_weights_are_numbers(library: ctypes.CDLL) -> None:
    scores = torch.tensor([[float("inf"), 1e30] * 32, [-float("inf"), -1e30] * 32])
    for cap in CAPS:
        tile = weigh(library, scores, cap)
        expected = torch.exp(torch.tensor([cap, -cap], dtype=torch.float64)) * unit(cap)
        assert torch.allclose(tile.sums.double(), 64 * expected, rtol=1e-4)
        assert bool((tile.weights > 0).all() and tile.weights.isfinite().all())
        # Rounded least: many weights of small caps are near the largest one.
        assert bool((tile.weights[0] == 2.0 ** floor(cap * log2(e))).all())


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), -float("inf"), 1e4])
def test_what_is_hidden_does_not_show(library: ctypes.CDLL, hidden: float, keys: int) -> None:
    """Memory past the end of a context may hold anything, next to a key that is visible too."""
    for number, visible in enumerate(
        ([(0, 1), (0, 2)], [(0, 37), (0, 41)], [(3, 64), (6, 64)], [(5, 5), (0, 3)], [(17, 33), (18, 34)])
    ):
        places = torch.arange(keys)
        seen = torch.stack([(places >= first) & (places < end) for first, end in visible])
        scores = drawn(keys, 20.0, number).where(seen, hidden)
        tile = weigh(library, scores, 50.0, visible)
        check(tile, scores.where(seen, 0.0), 50.0, seen)
        assert bool((tile.weights[~seen] == 0).all())


def test_a_row_that_is_no_number_shows_in_no_other(library: ctypes.CDLL) -> None:
    for row in range(2):
        scores = drawn(128, 20.0)
        scores[row] = float("nan")
        tile = weigh(library, scores, 50.0)
        assert bool(tile.weights[row].isnan().all() and tile.sums[row].isnan() and tile.rounded[row].isnan())
        other = weigh(library, drawn(128, 20.0), 50.0)
        assert torch.equal(tile.weights[1 - row], other.weights[1 - row])
        assert torch.equal(tile.sums[1 - row], other.sums[1 - row])


def test_results_are_as_exact_as_with_the_largest_weight_1(library: ctypes.CDLL) -> None:
    """Sums of values over the sum of the rounded weights, beside weights over the row's maximum and the sum of the exact ones."""
    keys, cap, errors = 128, 50.0, []
    for seed in range(8):
        scores, values = drawn(keys, 24.0, seed), drawn(keys, 1.0, seed + 100).bfloat16().float().T
        capped = cap * torch.tanh(scores.double() * SCALE / cap)
        expected = torch.softmax(capped, 1) @ values.double()
        tile = weigh(library, scores, cap)
        scaled = torch.exp(capped - capped.amax(1, keepdim=True)).float()
        other = scaled.bfloat16().float() @ values / scaled.sum(1, keepdim=True)
        ours = tile.weights @ values / tile.rounded[:, None]
        errors.append([float((y - expected).norm() / expected.norm()) for y in (ours, other)])
    mine, theirs = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert mine < 1.25 * theirs < 0.005
