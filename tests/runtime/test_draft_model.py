"""A draft model changes no id, keeps its own cache consistent, and is checked before it is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.speculation import draft as draft_module
from gristmill.runtime.speculation.config import Speculation
from gristmill.runtime.speculation.draft import DraftModelProposer
from tests.runtime.draft_sources import use
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS
from tests.runtime.test_speculation import PARAMS, PROMPTS, STATES, content


def drafted_by(name: str, tokens: int = 3) -> Speculation:
    return Speculation("draft", tokens, MODELS / name, adaptive=False)


def checked(llm: LLM) -> DraftModelProposer:
    """Lets every step check the blocks of the draft model's cache."""
    speculator = llm.engine.speculator
    assert speculator is not None and isinstance(speculator.proposer, DraftModelProposer)
    proposer = use(llm.engine, speculator.proposer)
    propose = proposer.propose

    def check(requests: Any) -> Any:
        drafts = propose(requests)
        held = [block for s in proposer._sequences.values() for block in s.block_ids]
        assert sorted([*held, *proposer._free]) == list(range(proposer.runner.cache.num_blocks))
        return drafts

    proposer.propose = check
    return proposer


@pytest.mark.parametrize(("name", "draft"), [(LLAMA, DEEPSEEK), (DEEPSEEK, LLAMA), (LLAMA, LLAMA)])
def test_same_ids(make: Callable[..., LLM], shared: Callable[..., LLM], name: str, draft: str) -> None:
    llm = make(name, speculate=drafted_by(draft))
    proposer = checked(llm)
    assert content(llm.generate(PROMPTS, PARAMS)) == content(shared(name).generate(PROMPTS, PARAMS))
    status = llm.engine.status().speculation
    assert status is not None and status.drafts > 20
    assert status.draft_bytes == proposer.runner.model.plans.weight_bytes + proposer.runner.cache.nbytes > 0
    assert not proposer._sequences and len(proposer._free) == 256


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=25), SamplingParams(max_tokens=25, temperature=1.0, top_p=0.9, seed=4)],
)
def test_a_model_accepts_all_its_own_drafts(make: Callable[..., LLM], params: SamplingParams) -> None:
    """Greedy and sampled: with the same noise the draft is the draw. Without it, it would rarely be."""
    llm = make(LLAMA, speculate=drafted_by(LLAMA, 5))
    checked(llm)
    llm.generate(PROMPTS[:3], params)
    status = llm.engine.status().speculation
    assert status is not None and status.accepted_tokens == status.draft_tokens > 30


def test_independent_noise_shows(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the draft model draws with the noise of another output index."""
    row = draft_module.SamplingRow
    monkeypatch.setattr(
        draft_module, "SamplingRow", lambda params, seed, index: row(params, seed, index + 99)
    )
    llm = make(LLAMA, speculate=drafted_by(LLAMA, 5))
    checked(llm)
    llm.generate(PROMPTS[:3], SamplingParams(max_tokens=25, temperature=1.5, seed=4))
    status = llm.engine.status().speculation
    assert status is not None and status.accepted_tokens < 0.8 * status.draft_tokens


@pytest.mark.parametrize(
    "state", ["chunks", *(pytest.param(s, marks=pytest.mark.slow) for s in ("preemption", "no prefix cache"))]
)
def test_in_every_state(make: Callable[..., LLM], shared: Callable[..., LLM], state: str) -> None:
    """Preempted requests keep what the draft model has computed; prompts longer than a step are read in several."""
    llm = make(LLAMA, speculate=drafted_by(DEEPSEEK), **STATES[state])
    checked(llm)
    assert content(llm.generate(PROMPTS, PARAMS)) == content(shared(LLAMA).generate(PROMPTS, PARAMS))


def test_a_cache_that_is_too_small_for_all(make: Callable[..., LLM], shared: Callable[..., LLM]) -> None:
    """The draft model's cache holds two requests: others take no drafts, or the place of a request that waits."""
    llm = make(LLAMA, speculate=drafted_by(LLAMA))
    proposer = checked(llm)
    del proposer._free[:]
    proposer._free += range(5)
    proposer.runner.cache.num_blocks = 5
    params = SamplingParams(max_tokens=20)
    assert content(llm.generate(PROMPTS, params)) == content(shared(LLAMA).generate(PROMPTS, params))
    status = llm.engine.status().speculation
    assert status is not None and status.accepted_tokens > 10
    assert status.reasons["the proposer had no drafts"] > 20 and sorted(proposer._free) == [*range(5)]


def test_a_step_that_fails_leaves_the_draft_model_consistent(
    make: Callable[..., LLM], shared: Callable[..., LLM]
) -> None:
    """Every third step of the draft model fails before it has run; the same drafts are accepted as without failures."""
    llm = make(LLAMA, speculate=drafted_by(LLAMA))
    proposer, calls = checked(llm), []
    run, step = proposer.runner.run, llm.engine.step

    def failing(entries: Any, rows: Any) -> Any:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise MemoryError
        return run(entries, rows)

    def again() -> Any:
        for _ in range(9):
            try:
                return step()
            except MemoryError:
                llm.engine.scheduler.check()
        raise AssertionError

    proposer.runner.run = failing  # type: ignore[method-assign]
    llm.engine.step = again  # type: ignore[method-assign]
    llm.engine.speculator.config = Speculation("draft", 2, MODELS / LLAMA, adaptive=False)  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=20)
    assert content(llm.generate(PROMPTS[:2], params)) == content(shared(LLAMA).generate(PROMPTS[:2], params))
    status = llm.engine.status().speculation
    assert status is not None and status.accepted_tokens == status.draft_tokens > 10


def test_what_the_cache_keeps_after_verification() -> None:
    """Drafts that became known tokens stay, others do not; the last known token is fed again, because a draft is drawn behind it."""
    for tokens, known in (
        ([1, 2, 3, 5, 6, 7], 5),  # both accepted, and one more
        ([1, 2, 3, 5, 9], 4),  # one accepted
        ([1, 2, 3, 9], 3),
        ([1, 2, 3, 5], 3),  # a step that did not verify the second
        ([1, 2, 3, 9, 6, 6, 6], 3),  # steps without drafts since then
        ([1, 2, 3], 2),  # the drafts were not verified
    ):
        sequence = draft_module._Sequence([0], 3, [5, 6])
        sequence.keep_valid(tokens)
        assert (sequence.known, sequence.fed) == (known, []), tokens


@pytest.mark.slow
def test_stale_drafts_in_the_cache_show(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: rejected drafts stay in the draft model's cache as if they had been accepted. Every fourth step has drafts."""

    def keep_all(self: Any, tokens: Any) -> None:
        self.known = min(self.known + len(self.fed), len(tokens) - 1)
        self.fed.clear()

    acceptance = []
    for fault in (False, True):
        if fault:
            monkeypatch.setattr(draft_module._Sequence, "keep_valid", keep_all)
        llm = make(DEEPSEEK, speculate=drafted_by(LLAMA))
        proposer, calls = checked(llm), []
        propose = proposer.propose

        def rarely(requests: Any, propose: Any = propose, calls: list[int] = calls) -> Any:
            calls.append(1)
            return propose(requests) if len(calls) % 4 == 0 else [[] for _ in requests]

        proposer.propose = rarely  # type: ignore[method-assign]
        llm.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
        status = llm.engine.status().speculation
        assert status is not None
        acceptance.append(status.acceptance)
    assert acceptance[1] < acceptance[0]


def test_sleep_and_new_weights(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, speculate=drafted_by(LLAMA))
    params = SamplingParams(max_tokens=12)
    before = content(llm.generate(PROMPTS[:2], params))
    proposer = checked(llm)
    llm.engine.sleep()
    assert proposer.runner.cache.nbytes == 0
    llm.engine.wake_up()
    llm.engine.update_weights(MODELS / LLAMA)
    assert content(llm.generate(PROMPTS[:2], params)) == before
    status = llm.engine.status().speculation
    assert status is not None and status.accepted_tokens == status.draft_tokens


def test_the_cache_of_the_draft_is_within_the_memory(make: Callable[..., LLM]) -> None:
    memory = 8 << 20
    alone = make(LLAMA, num_blocks=None, memory=memory).engine.status()
    status = make(LLAMA, num_blocks=None, memory=memory, speculate=drafted_by(DEEPSEEK)).engine.status()
    assert status.speculation is not None and 0 < status.num_blocks < alone.num_blocks
    assert status.cache_bytes < alone.cache_bytes <= memory


def test_tokenizers_must_be_the_same(make: Callable[..., LLM], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODELS / LLAMA, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [token for token in vocab if len(token) > 3][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="is not that of .*: 2 tokens have another id"):
        make(LLAMA, speculate=f"draft:{other}")
    (other / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="cannot be compared with that of"):
        make(LLAMA, speculate=f"draft:{other}")


def test_models_without_tokenizers_must_have_vocabularies_of_one_size(
    make: Callable[..., LLM], tmp_path: Path
) -> None:
    folders = [tmp_path / "target", tmp_path / "draft"]
    for folder in folders:
        shutil.copytree(MODELS / LLAMA, folder)
        (folder / "tokenizer.json").unlink()
    llm = make(folders[0], speculate=f"draft:{folders[1]}:2")
    assert llm.engine.speculator is not None and llm.engine.speculator.config.most_tokens == 2
    config = json.loads((folders[1] / "config.json").read_text())
    (folders[1] / "config.json").write_text(json.dumps({**config, "vocab_size": 4000}))
    with pytest.raises(UsageError, match="its vocabulary has 4000 tokens, that of .* 4096"):
        make(folders[0], speculate=f"draft:{folders[1]}")


def test_mistakes(make: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a model: draft:DIR"):
        make(LLAMA, speculate="draft")
    with pytest.raises(
        UsageError, match="draft model: no model directory no-such-folder: expected a folder with"
    ):
        make(LLAMA, speculate="draft:no-such-folder")
    with pytest.raises(UsageError, match="draft model: .* has no config.json"):
        make(LLAMA, speculate=f"draft:{tmp_path}")
    with pytest.raises(UsageError, match="cannot read no-such-file.gguf: No such file"):
        make(LLAMA, speculate="draft:no-such-file.gguf")
    assert Speculation.parse("draft:a:b") == Speculation("draft", model="a:b")
    assert Speculation.parse("draft:a:7") == Speculation("draft", 7, "a")
