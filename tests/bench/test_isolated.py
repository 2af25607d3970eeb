"""Isolated calls: the input of each depends on the output of its predecessor, which shows what back-to-back
calls hide."""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gristmill.autotune.candidate import Candidate, TimingMode, WrongResultError, timing_name
from gristmill.autotune.place import place
from gristmill.autotune.rotation import Rotation
from gristmill.bench.cli import cli
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store
from gristmill.kernel_registry.times import deployed
from tests.bench import cheats
from tests.calls import positional

PROBLEM = cheats.OP.problem("m=16,n=256")
WORK, AHEAD = 1.5e-3, 0.6e-3
"""Seconds of a call's own work, and of the part that can be done in advance."""

POOL = ThreadPoolExecutor(1)
DONE: dict = {}


@positional
def overlaps_with_its_neighbour(config, x, weight, eps, out):
    """Correct, and no cheat that reads results in advance: while a call runs, this kernel starts on the input
    of the next call.

    It assumes that the content at that address stays as it is, and starts again if it changed.
    """
    key, version = x.data_ptr(), x._version
    ahead = DONE.pop(key, None)
    if ahead is None or ahead[0] != version:
        time.sleep(AHEAD)
    else:
        ahead[1].result()
    follows = DONE.setdefault("follows", {})
    follows[DONE.get("last")] = x
    DONE["last"] = key
    if (then := follows.get(key)) is not None:
        DONE[then.data_ptr()] = (then._version, POOL.submit(time.sleep, AHEAD))
    time.sleep(WORK)
    cheats.honest(config, x, weight, eps, out)


@pytest.fixture(autouse=True)
def own_store(policy_file):
    DONE.clear()
    POOL.submit(int).result()  # its thread exists before any call
    return policy_file()


def us(kernel, *, isolated: bool) -> float:
    candidate = Candidate(
        kernel, {}, Rotation(cheats.OP, kernel, PROBLEM, "cpu", hot=True), isolated=isolated
    )
    actual = min(candidate.sample() for _ in range(40))  # a busy machine only adds time
    candidate.conclude()  # no audit objects
    return actual


def test_an_overlap_with_the_neighbour_shows_in_isolated_calls_alone() -> None:
    kernel = replace(
        cheats.kernel(overlaps_with_its_neighbour), target=f"{__name__}:overlaps_with_its_neighbour"
    )
    hidden, shown = us(kernel, isolated=False), us(kernel, isolated=True)
    assert hidden < 0.85 * shown, (hidden, shown)
    assert shown == pytest.approx(1e6 * (WORK + AHEAD), rel=0.35)  # all of the time, without the ties


def test_calls_that_take_less_than_their_ties_are_no_reuse_of_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the ties may take longer than calls including their ties."""
    honest = default_registry().kernel("rms_norm", "rms_norm_cpu")
    config = honest.config(PROBLEM, place("cpu").target)
    candidate = Candidate(
        honest, config, Rotation(cheats.OP, honest, PROBLEM, "cpu", hot=True), isolated=True, audited=False
    )
    # The first calls are audits, so that conclude looks closer.
    sample, disturbed = (
        candidate._timed.sample,
        iter((1000.0, 1000.0)),
    )
    monkeypatch.setattr(candidate._timed, "sample", lambda *count: (sample(*count), next(disturbed, 5.0))[1])
    candidate.samples, candidate._tie_us = [1.0], 50.0
    candidate.conclude()


def test_an_honest_kernel_takes_as_long_isolated() -> None:
    honest = default_registry().kernel("rms_norm", "rms_norm_cpu")
    problem = cheats.OP.problem("m=256,n=4096")
    config, rotation = (
        honest.config(problem, place("cpu").target),
        Rotation(cheats.OP, honest, problem, "cpu"),
    )
    candidates = [Candidate(honest, config, rotation, isolated=isolated) for isolated in (False, True)]
    times = [[min(candidate.sample() for _ in range(3)) for candidate in candidates] for _ in range(15)]
    assert statistics.median(b / a for a, b in times) == pytest.approx(1.0, abs=0.2)


def test_a_tie_changes_no_bit_and_is_seen_by_whoever_waits_for_it() -> None:
    kernel = cheats.kernel(cheats.honest)
    rotation = Rotation(cheats.OP, kernel, PROBLEM, "cpu")
    assert rotation.tied() == ""
    before = [inputs.arguments[0].clone() for inputs in rotation.sets]
    for _ in range(2 * len(rotation.sets)):
        call = rotation.next()
        following = rotation.sets[rotation.turn].arguments[0]
        cheats.honest({}, call)
        version = following._version
        rotation.tie()
        assert following._version == version + 1  # written after a read of `out`
    assert all(torch.equal(a, inputs.arguments[0]) for a, inputs in zip(before, rotation.sets, strict=True))
    rotation.refresh()  # the content is different now, and ties write that content
    fresh = [inputs.arguments[0].clone() for inputs in rotation.sets]
    for _ in rotation.sets:
        rotation.next()
        rotation.tie()
    assert all(torch.equal(a, inputs.arguments[0]) for a, inputs in zip(fresh, rotation.sets, strict=True))


def test_cheats_are_caught_in_isolated_calls_too() -> None:
    cheats.leave()
    kernel = cheats.kernel(cheats.writes_skipped_after_a_while)
    with pytest.raises(WrongResultError):
        candidate = Candidate(kernel, {}, Rotation(cheats.OP, kernel, PROBLEM, "cpu"), isolated=True)
        for _ in range(60):
            candidate.sample()
        candidate.conclude()
    cheats.leave()


def test_names_of_timing_modes_read_back() -> None:
    for captured in (False, True):
        for hot in (False, True):
            for isolated in (False, True):
                assert TimingMode.parse(timing_name(captured, hot, isolated)) == (not captured, hot, isolated)
    assert TimingMode.parse("") == (False, False, False)


def test_every_way_of_timing_has_its_own_entry_and_selection_goes_by_cold_calls_back_to_back(
    own_store: Path,
) -> None:
    result = CliRunner().invoke(
        cli,
        [
            "bench",
            "rms_norm",
            "--problem",
            "m=64,n=1024",
            "--kernels",
            "rms_norm_cpu",
            "--target",
            "cpu",
            "--seconds",
            "0.05",
            "--save",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    timings = Store.read(Policy.current().store_path).timings
    assert {t.timing for t in timings} == {"eager,cold", "eager,hot", "eager,cold,isolated"} and len(
        {t.key for t in timings}
    ) == 3
    assert [t.timing for t in timings if deployed(t)] == ["eager,cold"]
    assert all(t.samples for t in timings)


def test_a_time_lost_in_what_ties_the_calls_together_is_left_out(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Candidate, "_tie", lambda self: time.sleep(1e-3))
    arguments = [
        "bench",
        "rms_norm",
        "--problem",
        "m=4,n=256",
        "--kernels",
        "rms_norm_cpu",
        "--seconds",
        "0.05",
    ]
    result = CliRunner().invoke(cli, [*arguments, "--target", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["times"].keys() == {"eager,cold", "eager,hot"}
