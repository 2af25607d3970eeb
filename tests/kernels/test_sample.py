"""sample: Philox's published test vectors, filters against transformers, statistics of draws, batch
invariance, planted faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gristmill import ops
from gristmill.kernels.sampling import sample
from gristmill.kernels.sampling.philox import philox4x32, token_uniforms
from tests.calls import make_call, positional
from tests.kernels.running import Runnable, runnables, verify_fault

HERE = runnables("sample")


def _parameters(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    index: int = 0,
) -> list[torch.Tensor]:
    return [
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full((rows,), seed),
        torch.full((rows,), index),
    ]


def _run(implementation: Runnable, logits: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.full((logits.shape[0],), -99)
    implementation(logits, *parameters, None, ids)
    return ids


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    """The vectors are those of Random123's kat_vectors for philox4x32 with 10 rounds."""
    actual = philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in actual) == answer


def test_counter_is_index_then_token_and_key_is_seed() -> None:
    seed, index, token = -0x123456789ABCDEF, 0x5_0000_0007, 11
    u = token_uniforms(torch.tensor([seed]), torch.tensor([index]), 12)[0, token]
    unsigned = seed % 2**64
    words = philox4x32(
        tuple(torch.tensor([w]) for w in (7, 5, token, 0)),
        (torch.tensor([unsigned % 2**32]), torch.tensor([unsigned >> 32])),
    )
    assert float(u) == ((int(words[0]) * 2**20 + int(words[1]) // 2**12) + 0.5) / 2**52


FILTERS = (
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.875, 0.0),
    (0, 0.25, 0.0),
    (0, 1.0, 0.125),
    (40, 0.75, 0.0625),
    (300, 0.96875, 0.015625),
    (1, 0.5, 0.5),
    (0, 0.001, 0.0),
)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_kept_sets_are_those_of_transformers(top_k: int, top_p: float, min_p: float, ties: bool) -> None:
    """Runs in float64, so that no sum rounds near a boundary.

    The sort in transformers is not stable: of equal logits it keeps as many as ours, but any of them; ours
    keeps the lower ids.
    """
    logits = 2 * torch.randn(16, 257, generator=torch.Generator().manual_seed(4))
    logits = (logits * 2).round() / 2 if ties else logits
    z = logits / torch.tensor(0.5)
    scores = TemperatureLogitsWarper(0.5)(None, logits.double())
    assert torch.equal(scores, z.double())
    for warper in (
        TopKLogitsWarper(top_k) if top_k else None,
        TopPLogitsWarper(float(torch.tensor(top_p))) if top_p < 1 else None,
        MinPLogitsWarper(min_p) if min_p else None,
    ):
        scores = scores if warper is None else warper(None, scores)
    parameters = _parameters(16, 0.5, top_k, top_p, min_p)
    actual = sample.kept(z, *parameters[1:4])
    if not ties:
        assert torch.equal(actual, scores > -math.inf)
    for row, reference_scores in zip(range(16), scores, strict=True):
        assert torch.equal(
            z[row, actual[row]].sort().values.double(),
            reference_scores[reference_scores > -math.inf].sort().values,
        )
        for value in z[row].unique():
            of_value = actual[row, z[row] == value].tolist()
            assert of_value == sorted(of_value, reverse=True)


@pytest.mark.parametrize("implementation", HERE, ids=str)
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_draws_stay_in_the_kept_set_and_agree(
    implementation: Runnable, top_k: int, top_p: float, min_p: float
) -> None:
    rows, seeds = (2, 1) if implementation.kernel.language == "triton" else (12, 3)
    logits = (4 * torch.randn(rows, 133, generator=torch.Generator().manual_seed(5))).round() / 2
    for seed in range(seeds):
        parameters = _parameters(rows, 1.25, top_k, top_p, min_p, seed, 3)
        ids = _run(implementation, logits, parameters)
        assert torch.equal(ids, sample.reference(logits, *parameters))
        assert sample.kept(logits / 1.25, *parameters[1:4]).gather(1, ids[:, None]).all()


@pytest.mark.parametrize("implementation", HERE, ids=str)
def test_uniform_logits_keep_the_exact_share(implementation: Runnable) -> None:
    """All logits are equal: top_p = 1/2 keeps exactly half, the lower ids; 0 keeps one; every draw is among
    them."""
    rows = 4 if implementation.kernel.language == "triton" else 24
    logits = torch.zeros(rows, 64)
    parameters = _parameters(rows, 1.0, 0, 0.5)
    parameters[4] = torch.arange(rows)
    assert sample.kept(logits, *parameters[1:4])[0].tolist() == [True] * 32 + [False] * 32
    ids = _run(implementation, logits, parameters)
    assert (
        torch.equal(ids, sample.reference(logits, *parameters))
        and (ids < 32).all()
        and len(set(ids.tolist())) > rows // 3
    )
    assert (_run(implementation, logits[:2], _parameters(2, 1.0, 0, 0.0)) == 0).all()


@pytest.mark.parametrize("implementation", HERE, ids=str)
def test_greedy_and_rows_without_an_answer(implementation: Runnable) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [1.0, 3, 3, 2, 3],
            [-inf] * 5,
            [0, nan, 1, 2, 3],
            [0, inf, 1, 2, 3],
            [-inf, -inf, 0, -inf, -inf],
            [-0.0, 0.0, -1, -1, -1],
        ]
    )
    for temperature in (0.0, 1e-6, -1.0, nan):
        ids = _run(implementation, logits, _parameters(6, temperature, 1, 0.1, 0.9))
        assert ids.tolist() == [1, -1, -1, -1, 2, 0]
    ids = _run(implementation, logits, _parameters(6, 1.0, 2, 0.9, 0.1))
    assert ids[1:5].tolist() == [-1, -1, -1, 2]


@pytest.mark.parametrize("implementation", HERE, ids=str)
@pytest.mark.parametrize("min_p", [1.0, 1.0001, 2.0, float("inf")])
def test_a_min_p_that_bars_every_token(implementation: Runnable, min_p: float) -> None:
    """At 1 the largest are left. Above, which `SamplingParams` refuses, all are equally impossible: the first of equals, as of the reference."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5))
    logits[:, 0] = -5.0
    parameters = _parameters(4, 0.7, 20, 0.9, min_p, seed=3)
    wanted = sample.reference(logits, *parameters).tolist()
    assert wanted == ([0] * 4 if min_p > 1 else logits.argmax(-1).tolist())
    assert _run(implementation, logits, parameters).tolist() == wanted


@pytest.mark.parametrize("implementation", HERE, ids=str)
def test_batch_invariance(implementation: Runnable) -> None:
    """A request's token does not depend on its row, its neighbours, or the row stride."""
    op = implementation.op
    rows = 3 if implementation.kernel.language == "triton" else 9
    arguments = op.inputs(op.problem(f"m={rows},v=301"), 6, "cpu")
    together = _run(implementation, arguments[0], arguments[1:7])
    flipped = _run(implementation, arguments[0].flip(0), [p.flip(0) for p in arguments[1:7]])
    assert torch.equal(flipped, together.flip(0))
    padded = torch.full((rows, 350), float("nan"))
    padded[:, 5:306] = arguments[0]
    for row in range(rows):
        single = _run(
            implementation, padded[row : row + 1, 5:306], [p[row : row + 1].clone() for p in arguments[1:7]]
        )
        assert single.item() == together[row].item()


TRITON = [implementation for implementation in HERE if implementation.kernel.language == "triton"]


@pytest.mark.parametrize("listed", [16384, 24])
@pytest.mark.parametrize("implementation", TRITON, ids=str)
def test_parts_of_rows_and_long_candidate_lists(
    implementation: Runnable, listed: int, monkeypatch: Any
) -> None:
    """Rows in one part and in three, candidates from a list and from the row: the tokens equal the
    reference's."""
    from gristmill.kernels.sampling import sample_triton

    monkeypatch.setattr(sample_triton, "LISTED", listed)
    noise = torch.randn(2, 299, generator=torch.Generator().manual_seed(11))
    for logits, parameters in (
        (2 * noise, _parameters(2, 1.0, 0, 0.9, 0.0, 3)),
        ((2 * noise).round(), _parameters(2, 0.7, 60, 0.8, 0.001, 4)),
        (noise * 0.01, _parameters(2, 1.0, 0, 0.99999994, 0.0, 5)),
        (noise.bfloat16(), _parameters(2, 0.05, 298, 1.0, 0.0, 6)),
        (1e4 * noise, _parameters(2, 1.0, 40, 0.5, 0.0, 7)),
    ):
        logits[1, ::5] = -math.inf
        expected = sample.reference(logits, *parameters)
        for splits in (1, 3) if listed > 299 else (3,):
            ids = torch.full((2,), -99)
            config = {"block": 64, "splits": splits, "warps": 4, "search": 256, "search_warps": 4}
            implementation.kernel.load()(config, make_call("sample", logits, *parameters, None, ids))
            assert torch.equal(ids, expected), (splits, parameters)


@pytest.mark.parametrize("listed", [8192, 100])
@pytest.mark.parametrize("implementation", TRITON, ids=str)
def test_rows_of_many_groups(implementation: Runnable, listed: int, monkeypatch: Any) -> None:
    """The tokens equal the reference's where the peaks of groups bound top_k (also with ties, and with fewer
    tokens than top_k), and where top_p over almost equal logits brackets the candidates twice."""
    from gristmill.kernels.sampling import sample_triton

    monkeypatch.setattr(sample_triton, "LISTED", listed)
    noise = torch.randn(2, 1500, generator=torch.Generator().manual_seed(12))
    tied = torch.where(noise > 1.5, 4.0, noise)
    barred = torch.full((2, 1500), -math.inf)
    barred[:, 77::250] = noise[:, 77::250]
    cases = (
        (2 * noise, _parameters(2, 1.0, 10, 1.0, 0.0, 21)),
        (noise * 1e-3 + 1e3, _parameters(2, 1.0, 0, 0.3, 0.0, 26)),
        (2 * noise, _parameters(2, 1.5, 10, 0.9, 0.0, 22)),
        (tied, _parameters(2, 0.7, 5, 0.6, 0.0, 23)),
        (barred, _parameters(2, 0.7, 10, 1.0, 0.0, 24)),
        (noise * 1e-3, _parameters(2, 1.0, 0, 0.7, 0.0, 25)),
    )
    for logits, parameters in cases if listed > 1500 else cases[:2]:
        ids = torch.full((2,), -99)
        config = {"block": 512, "splits": 3, "warps": 4, "search": 512, "search_warps": 4}
        implementation.kernel.load()(config, make_call("sample", logits, *parameters, None, ids))
        assert torch.equal(ids, sample.reference(logits, *parameters)), parameters


@pytest.mark.parametrize("implementation", TRITON, ids=str)
def test_infinite_temperature(implementation: Runnable) -> None:
    """Every token is equally likely. A logit of -inf divided by the infinite temperature is NaN, so that its
    row has no answer."""
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(13))
    logits[1, 7] = -math.inf
    parameters = _parameters(2, math.inf, 0, 0.5)
    ids = _run(implementation, logits, parameters)
    assert torch.equal(ids, sample.reference(logits, *parameters)) and ids[1] == -1


@pytest.mark.parametrize("implementation", TRITON, ids=str)
def test_workspace_of_exactly_its_size(implementation: Runnable) -> None:
    op, kernel = implementation.op, implementation.kernel
    problem = op.problem("m=4,v=300")
    config = kernel.config(problem, implementation.target)
    arguments = op.inputs(problem, 8, "cpu")[:7]
    size = kernel.workspace(problem, config).bytes
    band = torch.full((size + 512,), 171, dtype=torch.uint8)
    ids = torch.full((4,), -99)
    start = -band.data_ptr() % 256
    kernel.load()(config, make_call("sample", *arguments, band[start : start + size], ids))
    assert torch.equal(ids, sample.reference(*arguments))
    assert (band[:start] == 171).all() and (band[start + size :] == 171).all()
    with pytest.raises(ValueError, match="workspace must be"):
        kernel.load()(config, make_call("sample", *arguments, band[start : start + size - 256], ids))


@pytest.mark.skipif(not TRITON, reason="needs Triton in the interpreter")
def test_rough_noise_is_within_its_margin() -> None:
    """Float32 noise against float64 noise, far tails included; `draw` relies on a margin of 1e-3."""
    from tests.kernels.noise_kernel import both_noises

    count = 1 << 20
    exact, rough = torch.empty(count, dtype=torch.float64), torch.empty(count)
    both_noises[(4,)](exact, rough, torch.tensor([5]), torch.tensor([5]), BLOCK=count // 4)
    u = token_uniforms(torch.tensor([5]), torch.tensor([5]), count)[0]
    assert float((exact + (-u.log()).log()).abs().max()) < 1e-12
    assert float(exact.max()) > 11 and float(exact.min()) < -2.4
    assert float((exact - rough).abs().max()) < 1e-4


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Returns the p-value of the observed counts; cells with an expected count below 5 are merged."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    observed, expected_counts = counts[~rare].double(), expected[~rare]
    if rare.any():
        observed = torch.cat([observed, counts[rare].sum()[None].double()])
        expected_counts = torch.cat([expected_counts, expected[rare].sum()[None]])
    return float(stats.chisquare(observed.numpy(), expected_counts.numpy()).pvalue)


def _draws(implementation: Runnable, logits: torch.Tensor, count: int, **filters: float) -> torch.Tensor:
    """Draws `count` tokens from one distribution: half with different seeds, half with different output
    indices of one seed."""
    parameters = _parameters(count, **filters)
    parameters[4][: count // 2] = torch.arange(count // 2)
    parameters[4][count // 2 :] = 77
    parameters[5][count // 2 :] = torch.arange(count - count // 2)
    return _run(implementation, logits.expand(count, -1).contiguous(), parameters)


FAST = [implementation for implementation in HERE if implementation.kernel.language != "triton"]


@pytest.mark.parametrize("implementation", FAST, ids=str)
def test_draws_follow_the_distribution(implementation: Runnable) -> None:
    logits = torch.linspace(0, 4, 23)[torch.randperm(23, generator=torch.Generator().manual_seed(8))]
    for filters in ({"temperature": 1.0}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}):
        ids = _draws(implementation, logits, 20000, **filters)
        z = logits[None] / torch.tensor(filters["temperature"])
        kept = sample.kept(z, *_parameters(1, **filters)[1:4])
        probabilities = z.double().masked_fill(~kept, -math.inf).softmax(-1)[0]
        counts = ids.bincount(minlength=23)
        assert not counts[~kept[0]].any()
        assert _chi_square(counts[kept[0]], probabilities[kept[0]]) > 1e-4
        halves = torch.stack([ids[:10000].bincount(minlength=23), ids[10000:].bincount(minlength=23)])[
            :, kept[0]
        ]
        assert stats.chi2_contingency(halves.numpy()).pvalue > 1e-4


def test_tails_are_drawn_as_often_as_they_should() -> None:
    """The noise itself, in 4 million draws: its extreme values occur as often as the tails of a Gumbel
    distribution."""
    u = torch.cat([token_uniforms(torch.tensor([seed]), torch.tensor([0]), 1 << 20)[0] for seed in range(4)])
    assert float(u.min()) > 0 and float(u.max()) < 1
    for tail in (2.0**-8, 2.0**-14, 2.0**-18):
        for count in (int((u < tail).sum()), int((u > 1 - tail).sum())):
            assert stats.binomtest(count, u.numel(), tail).pvalue > 1e-4
    # The noise also resolves tails far below 2^-24: its largest value exceeds 36.
    assert float(-(-torch.tensor((2**52 - 0.5) / 2**52, dtype=torch.float64).log()).log()) > 36


@pytest.mark.parametrize("implementation", FAST, ids=str)
def test_rare_tokens_come(implementation: Runnable) -> None:
    """One likely token and 511 tokens that share 1 %: they are drawn in 1 % of the cases, evenly."""
    logits = torch.full((512,), math.log(0.01 / 511))
    logits[100] = math.log(0.99)
    ids = _draws(implementation, logits, 6000)
    rare = ids[ids != 100]
    assert stats.binomtest(rare.numel(), 6000, 0.01).pvalue > 1e-4
    assert stats.kstest(rare.numpy() / 512, "uniform").pvalue > 1e-4


def test_seeds_and_positions_are_independent() -> None:
    """Neighbouring seeds, and neighbouring indices, give unrelated tokens."""
    logits = torch.zeros(4000, 8)
    for which in (4, 5):
        parameters = _parameters(4000)
        parameters[which] = torch.arange(4000)
        ids = sample.reference(logits, *parameters)
        table = torch.zeros(8, 8)
        table.index_put_((ids[:-1], ids[1:]), torch.ones(3999), accumulate=True)
        assert stats.chi2_contingency(table.numpy()).pvalue > 1e-4


def test_refusals() -> None:
    logits, parameters = torch.zeros(2, 16), _parameters(2)
    with pytest.raises(ValueError, match=r"logits must be \[m, v\] .m: requests; v: vocabulary., got \[16\]"):
        sample.OP.describe(logits[0], *parameters)
    with pytest.raises(TypeError, match="logits must be"):
        sample.OP.describe(logits.half(), *parameters)
    with pytest.raises(TypeError, match="seed must be torch.int64, got torch.int32"):
        sample.OP.describe(logits, *parameters[:4], parameters[4].int(), parameters[5])
    with pytest.raises(ValueError, match=r"top_k must be \[m\] = \[2\], m as in logits, got \[1\]"):
        sample.OP.describe(logits, parameters[0], parameters[1][:1], *parameters[2:])
    with pytest.raises(ValueError, match="logits must be contiguous in its last dimension"):
        sample.OP.describe(logits.T.contiguous().T, *parameters)


def test_through_the_operator(policy_file: Any) -> None:
    policy_file("strict = true\n[pins]\nsample = ['sample_cpu', 'sample_torch']\n")
    parameters = _parameters(3, 0.8, seed=5)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(9))
    assert torch.equal(ops.sample(logits, *parameters), sample.reference(logits, *parameters))


@positional
def swapped_counter(config, logits, temperature, top_k, top_p, min_p, seed, index, workspace, ids) -> None:
    ids.copy_(sample.reference(logits, temperature, top_k, top_p, min_p, index, seed))


@positional
def top_p_before_top_k(config, logits, temperature, top_k, top_p, min_p, seed, index, workspace, ids) -> None:
    greedy = temperature < 1e-5
    z = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    off = torch.zeros_like(top_k)
    both = sample.kept(z, off, top_p, min_p) & sample.kept(z, top_k, torch.ones_like(top_p), min_p)
    filtered = logits.float().masked_fill(~both & ~greedy[:, None], -math.inf)
    ids.copy_(
        sample.reference(
            filtered, temperature, off, torch.ones_like(top_p), torch.zeros_like(min_p), seed, index
        )
    )


@positional
def ties_to_the_last(config, logits, temperature, top_k, top_p, min_p, seed, index, workspace, ids) -> None:
    correct = sample.reference(logits, temperature, top_k, top_p, min_p, seed, index)
    last = logits.shape[1] - 1 - logits.float().flip(-1).argmax(-1)
    ids.copy_(torch.where(temperature < 1e-5, last, correct))


@positional
def a_row_late(config, logits, temperature, top_k, top_p, min_p, seed, index, workspace, ids) -> None:
    ids.copy_(sample.reference(logits, temperature, top_k, top_p, min_p, seed.roll(1), index))


@pytest.mark.parametrize(
    "launcher", ["swapped_counter", "top_p_before_top_k", "ties_to_the_last", "a_row_late"]
)
def test_planted_faults(launcher: str) -> None:
    outcome = verify_fault("sample", __name__, launcher, "m=129,v=257")
    assert not outcome.ok and "tolerance" in outcome.reason
