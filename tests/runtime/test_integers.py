"""Token ids and integers of numpy and torch are taken where those of Python are, and nothing else is."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.integers import as_integer, integers
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.speculation.config import Speculation
from gristmill.tools.evaluate import evaluate
from tests.runtime.oracle import LLAMA, eval_tokens

PARAMS = SamplingParams(max_tokens=4)
IDS = [262, 1181, 549, 493]
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "int64": np.array,
    "uint16": lambda ids: np.array(ids, dtype=np.uint16),
    "strided": lambda ids: np.repeat(ids, 2)[::2],
    "numpy integers": lambda ids: [np.int32(i) for i in ids],
    "tensor": torch.tensor,
    "int32 tensor": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "elements of a tensor": lambda ids: list(torch.tensor(ids)),
    "tuple": tuple,
}


@pytest.fixture
def llm(shared: Callable[..., LLM]) -> LLM:
    return shared(LLAMA)


@pytest.mark.parametrize("form", FORMS)
def test_prompts(llm: LLM, form: str) -> None:
    prompt = FORMS[form](IDS)
    expected = llm.generate(IDS, PARAMS)
    assert llm.generate(prompt, PARAMS) == expected
    assert llm.generate([prompt, IDS, "The"], PARAMS)[0] == expected[0]
    assert all(type(i) is int for i in llm.generate(prompt, PARAMS)[0].prompt_ids)
    llm.engine.add_request("a", prompt, PARAMS, priority=np.int64(1))
    assert llm.engine.scheduler.requests["a"].tokens == IDS
    llm.engine.abort()


def test_prompts_of_an_async_engine(make: Callable[..., LLM]) -> None:
    async def run() -> None:
        async with AsyncEngine(make(LLAMA)) as engine:
            expected = await engine.generate(IDS, PARAMS)
            assert await engine.generate(torch.tensor(IDS), PARAMS, priority=np.int8(0)) == expected
            with pytest.raises(UsageError, match=r"in one dimension, got Tensor of int64 and shape \(1, 4\)"):
                await engine.generate(torch.tensor([IDS]), PARAMS)
            with pytest.raises(UsageError, match="must be a list or an array of token ids, got NoneType"):
                await engine.generate(None, PARAMS)  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.array([1.0, 2.0]), r"integers, got 1.0 in ndarray of float64 and shape \(2,\)"),
        (torch.tensor([1.0]), r"integers, got 1.0 in Tensor of float32 and shape \(1,\)"),
        (np.array([True]), r"integers, got True in ndarray of bool"),
        (torch.tensor([False]), r"integers, got False in Tensor of bool"),
        ([np.bool_(True), 1], "got"),
        ([1, True], "integers, got True in list"),
        ([1, 2.0], "integers, got 2.0 in list"),
        (np.array([IDS, IDS]), r"got ndarray of int64 and shape \(2, 4\)"),
        (
            [np.array([IDS])],
            r"one dimension, got ndarray of int64 and shape \(1, 4\): give each row by itself",
        ),
        (np.array(3), r"got ndarray of int64 and shape \(\)"),
        (np.array([], dtype=np.int64), "prompt is empty"),
        (np.array([70000]), "integers from 0 to 4095, got 70000"),
        ([torch.tensor([-1])], "integers from 0 to 4095, got -1"),
    ],
    ids=str,
)
def test_prompts_that_are_no_token_ids(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(prompt)
    assert not llm.engine.has_unfinished()


def test_priorities(llm: LLM) -> None:
    assert llm.generate([IDS, IDS], PARAMS, np.array([1, 0])) == llm.generate([IDS, IDS], PARAMS)
    assert llm.generate([IDS], PARAMS, np.int64(1)) == llm.generate([IDS], PARAMS)
    for wrong in (np.array([1]), 1.5, np.array([0.5, 1.5]), "ab"):
        with pytest.raises(UsageError, match="priority must be"):
            llm.generate([IDS, IDS], PARAMS, wrong)  # type: ignore[arg-type]


def test_sampling_params_are_kept_as_integers_and_numbers_of_python() -> None:
    given = SamplingParams(
        max_tokens=np.int64(7),
        temperature=np.float32(0.5),
        top_k=torch.tensor(3),  # type: ignore[arg-type]
        seed=np.uint64(9),
        min_tokens=np.int8(1),
        n=np.int32(2),
        logprobs=np.int64(0),
        stop_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
        allowed_token_ids=torch.tensor([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int64(1): np.float64(0.5)},
        bad_words=[np.array([3, 4]), "x"],  # type: ignore[list-item]
    )
    plain = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        seed=9,
        min_tokens=1,
        n=2,
        logprobs=0,
        stop_token_ids=(5, 6),
        allowed_token_ids=(1, 2),
        logit_bias={1: 0.5},
        bad_words=((3, 4), "x"),
    )
    assert given == plain and repr(given) == repr(plain) and hash(given) == hash(plain)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"max_tokens": np.bool_(True)}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": torch.tensor(True)}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": np.float64(3)}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": np.array([3])}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": np.int64(0)}, "max_tokens must be an integer of at least 1"),
        ({"temperature": np.float32("nan")}, "temperature must be a finite number"),
        ({"temperature": np.bool_(True)}, "temperature must be a finite number"),
        (
            {"allowed_token_ids": np.array([1.5])},
            "allowed_token_ids must be token ids, which are integers, got 1.5",
        ),
        (
            {"allowed_token_ids": np.array([-1])},
            "allowed_token_ids must be token ids .non-negative integers., got -1",
        ),
        ({"stop_token_ids": np.array([[1]])}, "stop_token_ids must be token ids in one dimension"),
        ({"logit_bias": {1.0: 1.0}}, "logit_bias must map token ids to finite numbers, got 1.0: 1.0"),
    ],
    ids=str,
)
def test_sampling_params_that_are_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**wish)


def test_integers_of_other_sequences() -> None:
    assert (
        integers(array("h", [1, 2]), "ids")
        == integers(range(1, 3), "ids")
        == integers({1, 2}, "ids")
        == [1, 2]
    )
    assert [as_integer(x) for x in (np.uint8(3), True, 1.0, "1", None)] == [3, None, None, None, None]
    for wrong in (b"ab", "12", memoryview(b"ab"), {1: 2}, iter([1])):
        with pytest.raises(UsageError, match="ids must be a list or an array of token ids, got"):
            integers(wrong, "ids")


def test_options_of_an_engine(make: Callable[..., LLM]) -> None:
    llm = make(
        LLAMA,
        num_blocks=np.int64(32),
        block_size=np.int32(16),
        max_seqs=np.int8(4),
        max_batch_tokens=np.int64(64),
        max_model_len=np.uint16(128),
        max_queued=np.int64(9),
        seed=np.int64(3),
        speculate=Speculation("ngram", tokens=np.int64(2)),
        kv_transfer=KVTransfer(["host:1MiB"], save_after=np.int64(1)),
    )
    config = llm.engine.scheduler.config
    sizes = (
        config.num_blocks,
        config.max_seqs,
        config.max_batch_tokens,
        config.max_model_len,
        config.max_queued,
    )
    assert sizes == (32, 4, 64, 128, 9) and {*map(type, sizes)} == {int}
    assert len(llm.generate(IDS, PARAMS)[0].token_ids) == 4
    with pytest.raises(UsageError, match="max_seqs must be an integer of at least 1"):
        make(LLAMA, max_seqs=np.float64(4))


def test_tokens_of_an_evaluation(llm: LLM) -> None:
    ids = eval_tokens()[:128]
    expected = evaluate(llm.engine, ids, 32, 2)
    for form in (np.array(ids, dtype=np.uint16), torch.tensor(ids)):
        assert evaluate(llm.engine, form, np.int64(32), 2).window_losses == expected.window_losses
    for wrong in (np.array(ids) - 5000, [*ids[:63], 4096]):
        with pytest.raises(UsageError, match="token ids must be from 0 to 4095"):
            evaluate(llm.engine, wrong, 32, 2)
    with pytest.raises(UsageError, match="tokens must be token ids, which are integers, got 1.0"):
        evaluate(llm.engine, np.ones(64), 32, 2)
