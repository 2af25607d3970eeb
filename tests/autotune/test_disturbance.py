"""The reasons why a device was held back, in words, from given counters."""

from __future__ import annotations

import pytest

from gristmill.autotune.disturbance import cpu_disturbances, disturbances, gpu_disturbances
from gristmill.autotune.environment import _ranges, cpu_state

QUIET = {"quota": 5.0, "steal": 7.0}


@pytest.mark.parametrize(
    ("after", "load", "said"),
    [
        (QUIET, 1.0, []),
        ({"quota": 5.05, "steal": 7.1}, 2.0, []),  # less than one percent
        ({"quota": 8.0, "steal": 7.0}, 1.0, ["30% of the time held by its quota"]),
        ({"quota": 5.0, "steal": 9.0}, 1.0, ["10% of the time taken by other guests"]),  # on two cores
        (QUIET, 6.5, ["load 6.5 on 2 core(s)"]),
    ],
)
def test_counters_in_words(after: dict[str, float], load: float, said: list[str]) -> None:
    loaded = disturbances(QUIET, after, 10.0, 2, load)
    assert len(loaded) == len(said) and all(text in line for text, line in zip(said, loaded, strict=True))


def test_a_system_without_counters_says_nothing() -> None:
    assert disturbances({}, {}, 1.0, 8, 0.5) == []
    with cpu_disturbances() as reasons:
        pass
    assert all(isinstance(text, str) for text in reasons)


def test_gpu_bits_in_words() -> None:
    assert gpu_disturbances("0x0000000000000001") == []  # idle
    assert gpu_disturbances("0x0000000000000044") == ["power limit", "heat (hardware)"]
    assert gpu_disturbances(None) == [] and gpu_disturbances("[Not Supported]") == []


def test_cores_and_pinning() -> None:
    assert _ranges([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"
    state = cpu_state()
    assert 1 <= state["usable"] <= state["cores"] and (state["pinned"] is None) == (
        state["usable"] == state["cores"]
    )
