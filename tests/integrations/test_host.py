"""Versions of hosts: served, too old, too new, not installed."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from gristmill.integrations import Host, HostError

TORCH = version("torch")


def host(minimum: str, below: str, *names: str) -> Host:
    return Host("PyTorch", names or ("torch",), minimum, below)


def test_a_served_version_is_answered() -> None:
    assert host("2.11", "99").require() == TORCH
    assert host("2.11", "99", "no-such-distribution", "torch").require() == TORCH
    assert host(TORCH.partition("+")[0], "99").require() == TORCH


@pytest.mark.parametrize("minimum,below", [("98", "99"), ("1.0", "2.0"), ("1.0", TORCH.partition("+")[0])])
def test_another_version_is_refused_with_both(minimum: str, below: str) -> None:
    with pytest.raises(HostError) as refused:
        host(minimum, below).require()
    assert str(refused.value) == (
        f"gristmill serves PyTorch >={minimum},<{below}, and torch {TORCH} is installed: "
        f"pip install 'torch>={minimum},<{below}'"
    )


def test_a_host_that_is_not_installed() -> None:
    with pytest.raises(HostError, match="and it is not installed: pip install 'no-such-distribution>=1,<2'"):
        host("1", "2", "no-such-distribution").require()


def test_a_version_that_no_test_runs_is_served_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tested = TORCH.rpartition(".")[0]
    assert Host("PyTorch", ("torch",), "1", "99", (tested,)).require() == TORCH and not caplog.records
    assert Host("PyTorch", ("torch",), "1", "99", ("1.0.", "98.")).require() == TORCH
    assert caplog.messages == [f"torch {TORCH} is installed; gristmill was tested with 1.0.*, 98.*"]
