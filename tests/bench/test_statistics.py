"""Verdicts: correct on noise with a known truth, and on real kernels on this machine."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from gristmill.autotune.candidate import Candidate, shared_rotations
from gristmill.autotune.gpu_clock import sm_clock
from gristmill.autotune.place import place
from gristmill.autotune.rounds import Rounds
from gristmill.bench.statistics.noise import Noise, NoiseError, self_test, summarize
from gristmill.bench.statistics.race import race
from gristmill.bench.statistics.verdict import FASTER, SAME, SLOWER, UNCLEAR, Rule, judge, merge
from tests.bench import slowed


def noise(rng: np.random.Generator, rounds: int, shift: float = 0.0) -> list[float]:
    """Returns log ratios as measured on a shared machine: a narrow core, and a tenth of the rounds disturbed
    on either side."""
    core = rng.normal(shift, 0.01, rounds)
    disturbed = rng.random(rounds) < 0.1
    return list(core + disturbed * rng.normal(0, 0.4, rounds))


def test_a_change_is_called_by_its_size() -> None:
    rng = np.random.default_rng(0)
    rows = [noise(rng, 64, math.log(factor)) for factor in (1.0, 1.08, 0.92, 1.03)]
    assert [v.verdict for v in judge(rows)] == [SAME, SLOWER, FASTER, UNCLEAR]
    slower = judge(rows)[1]
    assert slower.low < 1.08 < slower.high and slower.low > 1.03 and slower.rounds == 64


def test_false_discoveries_stay_rare_over_many_rows() -> None:
    rng = np.random.default_rng(1)
    # A true change slightly below the minimum effect.
    nothing = [noise(rng, 16, math.log(1.02)) for _ in range(500)]
    real = [noise(rng, 64, math.log(1.1)) for _ in range(50)]
    verdicts = [v.verdict for v in judge(nothing + real)]
    assert sum(v in (FASTER, SLOWER) for v in verdicts[:500]) <= 2
    assert verdicts[500:].count(SLOWER) >= 48


def test_the_level_is_kept_at_the_very_edge() -> None:
    """Rows whose true change is exactly the minimum effect, each judged alone, are reported in at most level
    / looks of the cases."""
    rng = np.random.default_rng(2)
    called = sum(judge([noise(rng, 24, math.log1p(0.03))], seed=i)[0].verdict == SLOWER for i in range(400))
    assert called <= 0.05 / 4 * 400 + 5


def test_load_that_comes_and_goes_is_not_counted_as_evidence() -> None:
    """Correlated rounds carry less evidence than as many independent ones. Treated as independent they would
    mislead."""
    rng = np.random.default_rng(3)
    walks = []
    for _ in range(200):
        walk = [0.0]
        for _ in range(63):
            walk.append(0.9 * walk[-1] + rng.normal(0, 0.03))
        walks.append(walk)
    assert np.mean([len(merge(w)) for w in walks]) < 20
    assert sum(v.verdict in (FASTER, SLOWER) for w in walks for v in judge([w])) <= 10
    independent = [list(rng.normal(0, 0.03, 64)) for _ in range(100)]
    assert np.mean([len(merge(row)) for row in independent]) > 55


def test_what_may_be_chance_among_many_rows_says_so() -> None:
    rng = np.random.default_rng(3)
    slow = list(0.1 + 0.01 * rng.permutation(8) / 8)  # with eight rounds, p is at least 1/128
    single, among = judge([slow])[0], judge([slow, *(list(rng.normal(0, 0.05, 16)) for _ in range(60))])[0]
    assert single.verdict == SLOWER and among.verdict == UNCLEAR
    assert "among 61 rows may be chance" in among.reason and "both sides" not in among.reason


def test_too_few_rounds_say_nothing() -> None:
    verdicts = judge([[0.5] * 4, []])
    assert [v.verdict for v in verdicts] == [UNCLEAR, UNCLEAR] and "8 are needed" in verdicts[0].reason


def test_a_time_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="no logarithm"):
        judge([[0.0, math.inf, 0.0]])
    with pytest.raises(ValueError, match="minimum effect is 0"):
        Rule(min_effect=0.0)


class Clockwork:
    """A candidate with random times, a drift that all candidates share, and a penalty for being first."""

    drift = 0.0

    def __init__(self, name: str, us: float, rng: np.random.Generator) -> None:
        self.name, self.us, self.rng, self.taken = name, us, rng, 0

    def sample(self) -> float:
        self.taken += 1
        Clockwork.drift += float(self.rng.normal(0, 0.002))
        return self.us * math.exp(Clockwork.drift) * (1 + abs(float(self.rng.standard_t(2))) * 0.02)


def test_unclear_rows_get_more_rounds_and_others_do_not() -> None:
    rng = np.random.default_rng(4)
    clear = Rounds([Clockwork("base", 10, rng), Clockwork("slow", 13, rng)])
    edge = Rounds([Clockwork("base", 10, rng), Clockwork("edge", 10.3, rng)])
    verdicts = race({"clear": clear, "edge": edge}, Rule())
    assert verdicts["clear", "slow"].verdict == SLOWER and clear.count == 16
    assert edge.count > 16 and verdicts["edge", "edge"].rounds == edge.count


def test_every_candidate_is_timed_in_every_round() -> None:
    rng = np.random.default_rng(5)
    candidates = [Clockwork(name, 10, rng) for name in "abc"]
    rounds = Rounds(candidates)
    race({"": rounds}, Rule(min_effect=0.2))
    assert {len(rounds.times[candidate.name]) for candidate in candidates} == {rounds.count} and len(
        {candidate.taken for candidate in candidates}
    ) == 1


def test_a_threshold_below_the_noise_is_refused() -> None:
    floor = Noise(floor=0.02, worst=0.03, comparisons=20, false=0, undecided=1)
    floor.refuse(0.03)
    with pytest.raises(
        NoiseError, match=r"1.00% is below this machine's noise floor of 2.00% \(20 comparisons"
    ):
        floor.refuse(0.01)
    with pytest.raises(ValueError, match="no A/A comparison"):
        summarize([])


# Real kernels on this machine, however noisy.


def candidate(kernel, name: str = "") -> Candidate:
    here = place("cpu")
    rotation = (
        candidate.shared.get(kernel.name)
        or shared_rotations(slowed.OP, slowed.PROBLEM, "cpu", [kernel])[kernel.name]
    )
    candidate.shared[slowed.HONEST.name] = candidate.shared[slowed.SLOWER.name] = rotation
    return Candidate(kernel, kernel.config(slowed.PROBLEM, here.target), rotation, name=name)


candidate.shared = {}


def slower_called(times: int) -> int:
    honest, slower = candidate(slowed.HONEST), candidate(slowed.SLOWER)
    actual = [
        race({"": Rounds([honest, slower])}, Rule(), seed=seed)["", slower.name] for seed in range(times)
    ]
    return sum(v.verdict == SLOWER for v in actual)


def test_a_kernel_is_the_same_as_itself() -> None:
    noise = self_test(lambda name: candidate(slowed.HONEST, name), Rule(), comparisons=10)
    assert noise.false == 0, noise


def test_eight_percent_slower_is_called_slower() -> None:
    assert slower_called(5) >= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 150 to 700 seconds on two cores with a load of five to thirteen
def test_200_comparisons_of_a_kernel_with_itself() -> None:
    noise = self_test(lambda name: candidate(slowed.HONEST, name), Rule(), comparisons=200)
    assert noise.false <= 2, noise


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_100_comparisons_with_eight_percent_slower() -> None:
    assert slower_called(100) >= 95


def test_rounds_off_the_median_clock_do_not_count() -> None:
    """A device that was held back in three rounds of sixteen took longer in those; no kernel is called slower
    for it."""
    rng, clocks = (
        np.random.default_rng(3),
        iter([1980.0] * 6 + [1200.0] * 3 + [1980.0, 1965.0, None] + [1980.0] * 4),
    )
    rounds = Rounds([Clockwork("base", 10, rng), Clockwork("other", 10, rng)], clock=lambda: next(clocks))
    rounds.run(16, random.Random(0))
    assert rounds.steady == [n for n in range(16) if n not in (6, 7, 8)]
    assert (
        rounds.kept("base") == [rounds.times["base"][n] for n in rounds.steady]
        and len(rounds.logs("other")) == 13
    )


def test_a_clock_that_wanders_or_is_unknown_discards_nothing() -> None:
    for clock in (None, lambda: None, iter([500.0 * n for n in range(1, 9)]).__next__):
        rng = np.random.default_rng(4)
        rounds = Rounds([Clockwork("base", 10, rng), Clockwork("other", 10, rng)], clock=clock)
        assert rounds.logs("other") == []
        rounds.run(8, random.Random(0))
        assert rounds.steady == [*range(8)] and len(rounds.logs("other")) == 8


def test_a_cpu_has_no_clock_to_read() -> None:
    assert sm_clock("cpu") is None
