"""A host's layer is taken where times say so. The host is planted: its product is ours, with a delay, or without work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gristmill.autotune import clock
from gristmill.integrations import measured
from gristmill.integrations.measured import SIZES, Call, Comparison, compare, times_file
from gristmill.integrations.measured_linear import LinearCase
from gristmill.integrations.product import Product
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.store import Store

CPU = torch.device("cpu")
CASE = LinearCase("planted", "1.0 Method", "int4_g128", 64, 256, torch.float32)


TIME = [0.0]
"""Seconds: products take as many as a test says, whatever this machine takes for them."""
MILLISECOND = 1e-3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, policy_file: Callable[..., object]) -> None:
    policy_file()
    without_bias = Product.without_bias

    def a_millisecond(self: Product, x: Tensor) -> Tensor:
        TIME[0] += MILLISECOND
        return without_bias(self, x)

    monkeypatch.setattr(clock, "now", lambda: TIME[0])
    monkeypatch.setattr(Product, "without_bias", a_millisecond)
    monkeypatch.setattr(measured, "_KNOWN", {})
    monkeypatch.setattr(measured, "list_count", lambda size, device: 2)
    monkeypatch.setattr(measured, "ROUNDS", 2)


class Host:
    """A host whose product takes `seconds` more than ours, and counts how often it is made."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.made = seconds, 0

    def __call__(self) -> Call:
        self.made += 1

        def product(x: Tensor) -> Tensor:
            TIME[0] += MILLISECOND + self.seconds
            return x.new_empty(len(x), CASE.n)

        return product


def test_a_slow_host_loses_and_the_next_start_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(0.05)
    found = compare(CASE, CPU, host)
    assert found.ahead and host.made == 2
    assert all(times == pytest.approx((1e3, 51e3)) for times in found.times.values()), str(found)
    assert compare(CASE, CPU, host) is found

    measured._KNOWN.clear()
    assert compare(CASE, CPU, host) == found and host.made == 2
    assert len(Store.read(times_file("planted", CPU)).timings) == 2 * len(SIZES)

    changed = replace(CASE, method="1.1 Method")
    assert compare(changed, CPU, host).ahead and host.made == 4

    monkeypatch.setattr(Kernel, "code_hash", lambda self, config=None, built=False: "another")
    measured._KNOWN.clear()
    assert compare(CASE, CPU, host).ahead and host.made == 6


def test_a_fast_host_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Product.without_bias

    def planted(self: Product, x: Tensor) -> Tensor:
        TIME[0] += 0.02
        return call(self, x)

    monkeypatch.setattr(Product, "without_bias", planted)
    found = compare(CASE, CPU, Host(0))
    assert not found.ahead and all(times == pytest.approx((21e3, 1e3)) for times in found.times.values()), (
        str(found)
    )


@pytest.mark.parametrize(
    ("times", "ahead"),
    [
        ([(10, 11), (10, 10), (10, 10), (10, 10)], True),
        ([(10, 10), (10, 10), (10, 10), (10, 20)], False),  # a prompt alone is no reason
        ([(10, 20), (10, 20), (10, 20), (10.3, 10)], False),  # a prompt behind by 3 %
        ([(10, 20), (10, 20), (10, 20), (10.1, 10)], True),
        ([(5, 20), (10.3, 10), (10, 20), (10, 20)], False),
        ([(10.1, 10), (10.1, 10), (10, 10.1), (10, 10)], False),  # behind in the mean
    ],
)
def test_ahead_in_the_mean_and_nowhere_far_behind(times: list[tuple[float, float]], ahead: bool) -> None:
    assert Comparison(dict(zip(SIZES, times, strict=True))).ahead is ahead


def test_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError("planted")

    monkeypatch.setattr(measured, "save", refuse)
    host = Host(0.02)
    assert compare(CASE, CPU, host) is compare(CASE, CPU, host) and host.made == 2
    assert "cannot be written, the next start measures again: planted" in caplog.text


def test_what_the_host_raises_is_not_caught() -> None:
    def host() -> Call:
        raise NotImplementedError("planted")

    with pytest.raises(NotImplementedError, match="planted"):
        compare(CASE, CPU, host)
    assert not times_file("planted", CPU).exists()


@pytest.mark.parametrize("fails", [False, True])
def test_calls_are_timed_outside_of_the_context_of_a_device(fails: bool) -> None:
    """In which the host makes layers, and its products. It is there again afterwards."""
    current = torch.overrides._get_current_function_mode
    modes = []

    def host() -> Call:
        modes.append(current())

        def product(x: Tensor) -> Tensor:
            modes.append(current())
            TIME[0] += MILLISECOND
            if fails:
                raise MemoryError
            return x

        return product

    with torch.device("cpu"), torch.device("cpu"):
        here = current()
        with pytest.raises(MemoryError) if fails else nullcontext():
            compare(CASE, CPU, host)
        assert current() is here
    assert current() is None and modes[:2] == [here, here] and set(modes[2:]) == {None}
