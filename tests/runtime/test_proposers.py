"""What proposers draft, where drafting is given up, and how speculation is asked for and reported."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill import Speculation
from gristmill.runtime import speculation
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.metrics import Metrics
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.speculation import DraftRequest, ngram, suffix
from gristmill.runtime.speculation.statistics import (
    FIRST_REST,
    FIRST_STEPS,
    LONGEST_REST,
    REFRESH,
    RETRY,
    SAMPLES,
    RequestGain,
    StepGains,
)
from gristmill.tools.cli import cli
from tests.runtime import oracle
from tests.runtime.draft_sources import Source, use
from tests.runtime.fake_runner import fake_engine
from tests.runtime.oracle import LLAMA
from tests.runtime.scheduler.harness import VOCAB, expected_ids

ROW = SamplingRow(SamplingParams(), 0, 0)


def request(tokens: list[int], count: int = 4, name: str = "r") -> DraftRequest:
    return DraftRequest(name, tokens, 1, count, ROW)


def ngram_by_search(tokens: list[int], count: int) -> list[int]:
    """Returns the continuation by looking at every place, from the last."""
    for size in range(min(ngram.LONGEST, len(tokens)), ngram.SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = tokens[end:]
                while len(text) < count:
                    text = text + text[: count - len(text)]
                return text[:count]
    return []


@pytest.mark.parametrize("seed", range(5))
def test_ngram_drafts_what_followed_the_last_match(seed: int) -> None:
    """Texts grow by several tokens at a time, as after accepted drafts; of several requests one ends and begins anew."""
    rng = random.Random(seed)
    proposer = ngram.NgramProposer()
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(3)]
    drafted = 0
    for _ in range(60):
        count = rng.randint(1, 9)
        drafts = proposer.propose([request(text, count, str(i)) for i, text in enumerate(texts)])
        assert drafts == [ngram_by_search(text, count) for text in texts]
        drafted += sum(map(bool, drafts))
        for text in texts:
            text += [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.1:
            proposer.ended("1", texts[1], 1)
            texts[1] = [rng.randrange(3)]
    assert drafted > 100
    proposer.reset()
    assert not proposer._indices


@pytest.mark.parametrize("seed", range(5))
def test_suffix_finds_every_match(seed: int) -> None:
    """Places and lengths of matches are those of a search at every place, also behind texts that were removed."""
    rng = random.Random(seed)
    index = suffix._Index()
    texts = [suffix._Text([rng.randrange(3) for _ in range(rng.randint(1, 60))]) for _ in range(6)]
    for text in texts:
        index.extend(text)
    for text in texts[:2]:
        index.remove(text)
    texts[3].tokens += [rng.randrange(3) for _ in range(9)]  # type: ignore[operator]
    index.extend(texts[3])
    for end in ([], [1, 2], [rng.randrange(3) for _ in range(50)], list(texts[4].tokens)):
        expected = []
        for text in texts[2:]:
            for place in range(suffix.ANCHOR, len(text.tokens)):
                most = min(len(end), place, suffix.LONGEST)
                lengths = [n for n in range(1, most + 1) if list(text.tokens[place - n : place]) == end[-n:]]
                if lengths and lengths[-1] >= suffix.ANCHOR:
                    expected.append((len(lengths), texts.index(text), place))
        actual = [(length, texts.index(text), place) for length, text, place in index.matches(end)]
        assert set(actual) <= set(expected) and len(actual) == min(len(expected), suffix.PLACES) == len(
            set(actual)
        )
    for text in texts[2:]:
        index.remove(text)
    assert not index.places


def test_suffix_drafts_past_outputs_and_the_own_text() -> None:
    proposer = suffix.SuffixProposer()
    answer = [*range(100, 140)]
    assert proposer.propose([request([1, 2, 3, *answer[:4]], 8)]) == [[]]
    proposer.ended("r", [1, 2, 3, *answer], 3)
    again = [9, 1, 2, 3]
    assert proposer.propose([request(again, 8)]) == [answer[:3]]  # as long as the match
    assert proposer.propose([request([*again, *answer[:5]], 8, "s")]) == [answer[5:13]]
    assert proposer.propose([request([*again, *answer[:5]], 2, "t")]) == [answer[5:7]]
    assert proposer.propose([request([7, 8, 9, 7, 8, 9, 7, 8, 9], 6, "u")]) == [[7, 8, 9] * 2]
    proposer.reset()
    assert proposer.propose([request(again, 8)]) == [[]]


def test_suffix_drafts_end_where_the_matches_disagree() -> None:
    proposer = suffix.SuffixProposer()
    for number in range(4):  # the same beginning, four continuations
        proposer.ended(str(number), [0, 1, 2, 3, 4, 5, 50 + number, 60 + number], 1)
    assert proposer.propose([request([0, 1, 2, 3, 4], 8)]) == [[5]]
    proposer.ended("4", [0, 1, 2, 3, 4, 5, 51, 61], 1)
    assert proposer.propose([request([0, 1, 2, 3, 4], 8, "s")]) == [[5, 51, 61]]  # two of five


def test_suffix_keeps_a_bounded_number_of_tokens() -> None:
    rng = random.Random(0)
    proposer = suffix.SuffixProposer(past_tokens=500)
    for number in range(200):
        tokens = [rng.randrange(40) for _ in range(rng.randint(1, 90))]
        proposer.propose([request(tokens, 4, str(number))])
        proposer.ended(str(number), tokens, rng.randint(1, len(tokens)))
        held = {id(text) for places in proposer._past.places.values() for text, _ in places}
        assert sum(len(text.tokens) for text in proposer._past_texts) == proposer._past_length <= 500
        assert held <= {id(text) for text in proposer._past_texts} and not proposer._own
        assert len(proposer._past.places) <= 500
    proposer.ended("long", [*range(3000)], 1)
    assert proposer._past_length == 500 == len(proposer._past_texts[0].tokens)


def test_proposers_are_found_by_their_declarations() -> None:
    assert speculation.proposers()["ngram"] is ngram.PROPOSER
    assert {"draft", "ngram", "suffix"} <= set(speculation.proposers())
    assert not speculation.failures()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", Speculation("ngram")),
        ("ngram:7", Speculation("ngram", 7)),
        (Speculation("ngram", 3), Speculation("ngram", 3)),
    ],
)
def test_speculation_as_text(text: Any, expected: Speculation) -> None:
    assert Speculation.parse(text) == expected
    assert expected.most_tokens == (expected.tokens or ngram.PROPOSER.tokens)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("oracle", "unknown speculation method 'oracle'; known: .*ngram"),
        ("", "unknown speculation method ''"),
        ("ngram:x", "expected ngram or ngram:TOKENS"),
        ("ngram:0", "drafts 1 to 64 tokens per step, got tokens = 0"),
        ("ngram:65", "got tokens = 65"),
        (5, "must be a Speculation or a text such as 'ngram:4', got int"),
    ],
)
def test_mistakes_in_speculation(make: Callable[..., LLM], wish: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(LLAMA, speculate=wish)


def test_fields_of_speculation_are_checked() -> None:
    with pytest.raises(UsageError, match="takes no model, got 'DIR'"):
        Speculation("ngram", model="DIR")
    with pytest.raises(UsageError, match="adaptive must be True or False, got 1"):
        Speculation("ngram", adaptive=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown speculation method None"):
        Speculation(None)  # type: ignore[arg-type]


def test_a_request_whose_drafts_are_rejected_rests_longer_each_time() -> None:
    gain, outputs, rests = RequestGain(), 0, []
    for _ in range(7):
        for _ in range(FIRST_STEPS):
            assert outputs >= gain.resumes_at
            outputs += 1
            gain.verified(0, outputs)
        rests.append(gain.resumes_at - outputs)
        outputs = gain.resumes_at
    assert rests == [min(FIRST_REST << n, LONGEST_REST) for n in range(7)]
    for _ in range(FIRST_STEPS):
        outputs += 4
        gain.verified(3, outputs)
    assert gain.rests == 0 and gain.resumes_at < outputs


def test_a_request_whose_drafts_become_wrong_is_given_up() -> None:
    gain = RequestGain()
    for step in range(50):
        gain.verified(3, 4 * step)
    wrong = 0
    while not gain.resumes_at:
        wrong += 1
        gain.verified(0, 200 + wrong)
    assert 5 <= wrong <= 15


def steps(gains: StepGains, seqs: int, count: int, drafted: float, plain: float, accepted: int) -> list[str]:
    """Runs steps that take `drafted` and `plain` seconds; returns the reasons for steps without drafts."""
    reasons = []
    for _ in range(count):
        reason = gains.refusal(seqs)
        reasons.append(reason)
        drafts = not reason
        gains.measured(seqs, drafted if drafts else plain, seqs * (1 + accepted * drafts), drafts)
    return reasons


def test_drafting_goes_on_where_it_gains() -> None:
    gains = StepGains()
    reasons = steps(gains, 3, 200, drafted=1.5, plain=1.0, accepted=1)
    assert all(reasons[:SAMPLES]) and not any(reasons[SAMPLES : SAMPLES + REFRESH])
    assert 1 <= sum(map(bool, reasons[SAMPLES:])) <= 200 // REFRESH
    assert gains.gains() == {4: pytest.approx(2 / 1.5)}


def test_drafting_ends_where_it_loses_and_is_tried_again() -> None:
    """At 16 sequences drafts cost more than they save; at 2 they do not, which 16 does not change."""
    gains = StepGains()
    reasons = steps(gains, 16, SAMPLES + SAMPLES + RETRY + SAMPLES, drafted=2.5, plain=1.0, accepted=1)
    assert reasons[SAMPLES : 2 * SAMPLES] == [""] * SAMPLES
    assert set(reasons[2 * SAMPLES : 2 * SAMPLES + RETRY]) == {"drafting lost at up to 16 sequences"}
    assert reasons[2 * SAMPLES + RETRY :] == [""] * SAMPLES
    assert gains.gains() == {16: pytest.approx(2 / 2.5)}
    assert steps(gains, 2, 50, drafted=1.2, plain=1.0, accepted=2)[SAMPLES:] == [""] * (50 - SAMPLES)


def test_one_slow_step_decides_nothing() -> None:
    gains = StepGains()
    gains.measured(1, 90.0, 1, False)  # a kernel was compiled
    steps(gains, 1, SAMPLES, drafted=1.5, plain=1.0, accepted=1)
    gains.measured(1, 90.0, 2, True)
    assert not any(steps(gains, 1, 20, drafted=1.5, plain=1.0, accepted=1))


@pytest.mark.parametrize("fault", [False, True])
def test_drafts_are_compared_with_steps_that_run_ahead(fault: bool) -> None:
    """A step that nothing overlaps takes 2 s, one that was launched ahead 1 s, one with drafts that accepts half a token 2.2 s: drafting gains beside
    the first, and loses beside the second. While it rests, steps run ahead.

    Planted fault: steps without drafts are synchronous, too, as if drafting had to be compared with them.
    """
    now = [0.0]
    engine, runner = fake_engine(True, Speculation("ngram", 2), num_blocks=400, max_seqs=2)
    speculator = engine.speculator
    assert speculator is not None
    launch, collect = runner.launch, runner.collect

    def timed(entries: Any, *others: Any) -> Any:
        if entries[0].tokens is not None:
            now[0] += 1.2 if entries[0].drafts else 1.0
        return launch(entries, *others)

    def taken(step: Any) -> Any:
        now[0] += 1.0
        return collect(step)

    def half(_: list[int], count: int, request: DraftRequest) -> list[int]:
        [right] = expected_ids(request.tokens, 1)
        return [right if len(request.tokens) % 3 else (right + 1) % VOCAB]

    runner.launch, runner.collect = timed, taken  # type: ignore[method-assign]
    speculator._clock = lambda: now[0]
    use(engine, Source({}, half))
    if fault:
        engine._pipeline.depth = 1
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=300))
    ids = [
        token
        for _ in range(400)
        if engine.has_unfinished()
        for output in engine.step()
        for token in output.new_ids
    ]
    assert ids == expected_ids([1, 2, 3], 300)
    gain = speculator.status().gains[1]
    assert (gain < 1) != fault
    assert (runner.most_in_flight == 2) != fault
    assert (speculator.counts.reasons["drafting lost at up to 1 sequences"] > 200) != fault


def test_engines_give_up_what_is_rejected(make: Callable[..., LLM]) -> None:
    """Steps are measured by a clock that says that drafting loses."""
    now = [0.0]
    llm = make(LLAMA, speculate="ngram:4")
    speculator = llm.engine.speculator
    assert speculator is not None
    launch = llm.engine.runner.launch

    def timed(entries: Any, *others: Any) -> Any:
        now[0] += 3.0 if any(entry.drafts for entry in entries) else 0.5
        return launch(entries, *others)

    llm.engine.runner.launch = timed  # type: ignore[method-assign]
    speculator._clock = lambda: now[0]
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    [with_drafts] = llm.generate([oracle.prompts()[9]], params)
    [without] = make(LLAMA).generate([oracle.prompts()[9]], params)
    assert with_drafts == without
    status = llm.engine.status().speculation
    assert status is not None and status.gains[1] < 1
    assert status.reasons["a step without drafts is measured"] == SAMPLES
    assert status.reasons["drafting lost at up to 1 sequences"] > 40


def test_metrics_of_drafts(make: Callable[..., LLM]) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    metrics = Metrics("toy", registry)
    engine = make(LLAMA, speculate=Speculation("ngram", 3, adaptive=False)).engine
    engine.add_request("a", oracle.prompts()[9], SamplingParams(max_tokens=60, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
        metrics.step(engine)
    status = engine.status().speculation
    assert status is not None and status.accepted_tokens > 0

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(
            f"vllm:spec_decode_num_{name}_total", {"model_name": "toy", **labels}
        )

    assert value("drafts") == status.drafts
    assert value("draft_tokens") == status.draft_tokens
    assert value("accepted_tokens") == status.accepted_tokens
    for position, count in enumerate(status.accepted_by_position):
        assert value("accepted_tokens_per_pos", position=str(position)) == count


def test_the_command_line_reports_drafts(tmp_path: Any) -> None:
    options = ("generate", "--model", str(oracle.MODELS / LLAMA), "--prompt", "The index of the index of")
    run = CliRunner().invoke
    plain = run(cli, [*options, "--max-tokens", "40", "--json"])
    drafted = run(cli, [*options, "--max-tokens", "40", "--json", "--speculate", "ngram:3"])
    one, other = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert one["token_ids"] == other["token_ids"] and one["speculation"] is None
    assert (
        other["speculation"]["method"] == "ngram" and len(other["speculation"]["accepted_by_position"]) == 3
    )
    shown = run(cli, [*options, "--max-tokens", "40", "--stats", "--speculate", "ngram:3"])
    assert "speculation by ngram" in shown.output and "drafts accepted" in shown.output
    assert "--speculate METHOD" in run(cli, [*options, "--max-tokens", "2", "--stats"]).output
    listed = json.loads(run(cli, ["supported", "--json"]).stdout)
    assert "ngram" in [proposer["name"] for proposer in listed["proposers"]]
