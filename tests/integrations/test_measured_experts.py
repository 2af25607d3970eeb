"""Experts of a host are timed beside ours: with which inputs and copies, and where the times are kept. The host is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from gristmill.autotune import clock
from gristmill.integrations import measured
from gristmill.integrations.experts import Experts
from gristmill.integrations.measured import SIZES, Call, compare, times_file
from gristmill.integrations.measured_experts import ROUTINGS, ExpertsCase
from gristmill.kernel_registry.store import Store
from gristmill.quant import quantize

CPU = torch.device("cpu")
CASE = ExpertsCase("planted", "1.0 Method", "int4_g128", 8, 2, 128, 128, torch.float32)
TIME = [0.0]
"""Seconds: products take as many as a test says, whatever this machine takes for them."""
MILLISECOND = 1e-3
Given = list[tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, policy_file: Callable[..., object]) -> Given:
    """Each call of ours takes a millisecond. What they were given."""
    policy_file()
    call, given = Experts.__call__, []

    def a_millisecond(self: Experts, *inputs: Tensor) -> Tensor:
        TIME[0] += MILLISECOND
        given.append(inputs)
        return call(self, *inputs)

    monkeypatch.setattr(clock, "now", lambda: TIME[0])
    monkeypatch.setattr(Experts, "__call__", a_millisecond)
    monkeypatch.setattr(measured, "_KNOWN", {})
    monkeypatch.setattr(measured, "ROUNDS", 2)
    return given


class Host:
    """A host whose experts take `seconds` more than ours, and that notes what it is given."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.made, self.given = seconds, 0, []

    def __call__(self) -> Call:
        self.made += 1

        def product(*inputs: Tensor) -> Tensor:
            TIME[0] += MILLISECOND + self.seconds
            self.given.append(inputs)
            return torch.empty_like(inputs[0])

        return product


def test_a_slow_host_loses_and_the_next_start_measures_nothing() -> None:
    host = Host(0.02)
    found = compare(CASE, CPU, host)
    made = host.made
    assert found.ahead and all(times == pytest.approx((1e3, 21e3)) for times in found.times.values())
    measured._KNOWN.clear()
    assert compare(CASE, CPU, host) == found and host.made == made
    kept = Store.read(times_file("planted", CPU)).timings
    assert [record.op for record in kept] == ["moe"] * 2 * len(SIZES)
    assert {record.kernel for record in kept} > {"planted"}


def test_a_fast_host_wins() -> None:
    assert not compare(CASE, CPU, Host(-MILLISECOND / 2)).ahead


def test_both_sides_get_the_same_experts(quick: Given) -> None:
    """In the same order; distinct for a token, and all of them over many tokens."""
    host = Host(0.0)
    compare(CASE, CPU, host)
    for size in SIZES:
        ours, theirs = ([x for x in calls if len(x[0]) == size] for calls in (quick, host.given))
        assert ours and theirs
        for (x, weights, ids), other in zip(ours, theirs, strict=False):
            assert x is other[0] and weights is other[1] and ids is other[2]
            assert ids.dtype == torch.int32 and weights.dtype == torch.float32
            assert weights.shape == ids.shape == (size, 2) and (weights > 0).all()
            torch.testing.assert_close(weights.sum(-1), torch.ones(size))
            assert (ids[:, 0] != ids[:, 1]).all()
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert len(counts) == 8 and (counts - 512).abs().max() < 120
    assert len({tuple(ids.flatten().tolist()) for x, _, ids in quick if len(x) == 16}) > 1
    assert len({tuple(ids.flatten().tolist()) for _, _, ids in CASE.inputs(16, CPU)}) == ROUTINGS


def test_as_many_copies_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 40]
    monkeypatch.setattr(measured, "free_bytes", lambda place: free[0])
    monkeypatch.setattr(measured, "list_count", lambda size, place: 5)
    for bytes_free, copies in ((1 << 40, 5), (3 * measured.MAKING * CASE.bytes(), 3), (0, 1)):
        free[0], host = bytes_free, Host(0.0)
        measured._KNOWN.clear()
        times_file("planted", CPU).unlink(missing_ok=True)
        compare(CASE, CPU, host)
        assert host.made == copies


def test_what_ours_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy has tensors of its own, with the same numbers: those of the reference."""
    (x, weights, ids), *_ = CASE.inputs(16, CPU)
    first, second = CASE.ours(CPU, 2)
    out = first(x, weights, ids)
    torch.testing.assert_close(second(x, weights, ids), out)
    pairs: Any = zip([*first.w13, *first.w2], [*second.w13, *second.w2], strict=True)
    assert all(a.data_ptr() != b.data_ptr() for a, b in pairs if a.numel())

    generator = torch.Generator().manual_seed(0)
    w13, w2 = (
        quantize(torch.randn(*shape, generator=generator) / 128**0.5, "int4_g128").dequantize()
        for shape in ((256, 128), (128, 128))
    )
    gate, up = (x @ w13.T).split(128, 1)
    torch.testing.assert_close(out, (silu(gate) * up) @ w2.T, atol=1e-4, rtol=1e-3)  # weights sum to 1
