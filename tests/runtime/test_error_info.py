"""A request that fails says why: each cause by its code, on completions, chunks and exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.completion import Chunk, Completion
from gristmill.runtime.engine_thread import EngineDeadError
from gristmill.runtime.errors import ErrorCode, ErrorInfo, RankError, UsageError, error_info
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.structured_output import StructuredOutput
from tests.runtime.oracle import LLAMA

TEXT = "The CREATE INDEX statement"
CODES = (
    "invalid_logits",
    "parameters_overflow",
    "no_token_allowed",
    "grammar_failed",
    "out_of_memory",
    "rank_failed",
    "engine_failed",
)
"""Those that the tests below show."""


def test_every_code_is_shown_here() -> None:
    assert get_args(ErrorCode) == CODES


def poison(llm: LLM, patch: pytest.MonkeyPatch, value: float, after: int = 0) -> None:
    """One logit of the first row of one step."""
    logits, calls = llm.model.logits, iter(range(1000))

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        rows = logits(hidden)
        if next(calls) == after:
            rows[0, 7] = value
        return rows

    patch.setattr(llm.model, "logits", poisoned)


def failed(completion: Completion | Chunk, code: str, message: str) -> None:
    assert completion.finish_reason == "error" and completion.error is not None
    assert completion.error.code == code and message in completion.error.message
    assert str(completion.error) == f"{code}: {completion.error.message}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"allowed_token_ids": range(100)}], ids=str)
def test_logits_that_are_not_finite(
    make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, value: float, more: dict[str, Any]
) -> None:
    """Also where the host processes or reads them, which is another path."""
    llm = make_plain(LLAMA)
    poison(llm, monkeypatch, value, after=1)
    params = [
        SamplingParams(max_tokens=4, ignore_eos=True, **more),
        SamplingParams(max_tokens=4, ignore_eos=True),
    ]
    first, second = llm.generate([TEXT, TEXT], params)
    failed(first, "invalid_logits", "NaN or infinite")
    assert len(first.token_ids) == 1
    assert second.finish_reason == "length" and second.error is None


def test_drafts_change_no_cause(make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_plain(LLAMA, speculate="ngram:3")
    poison(llm, monkeypatch, float("nan"), after=4)
    [completion] = llm.generate(["a b a b a b a b"], SamplingParams(max_tokens=40, ignore_eos=True))
    failed(completion, "invalid_logits", "NaN or infinite")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"bad_words": [[5]], "allowed_token_ids": [5]},
            "allowed_token_ids and bad_words allow no token after 0 tokens",
        ),
        (
            {"stop_token_ids": [5], "allowed_token_ids": [5], "min_tokens": 2},
            "allowed_token_ids and min_tokens allow no token after 0 tokens",
        ),
        (
            {
                "bad_words": [[5, 6]],
                "allowed_token_ids": [5, 6],
                "logit_bias": {5: 50.0},
                "frequency_penalty": 2.0,
            },
            None,
        ),
        (
            {"structured_output": StructuredOutput(choice=["aaaa"]), "allowed_token_ids": [5]},
            "structured_output and allowed_token_ids allow no token after 0 tokens of output",
        ),
    ],
    ids=str,
)
def test_parameters_in_conflict(
    shared: Callable[..., LLM], wish: dict[str, Any], message: str | None
) -> None:
    llm = shared(LLAMA)
    first, second = llm.generate(
        [TEXT, TEXT], [SamplingParams(max_tokens=8, **wish), SamplingParams(max_tokens=8)]
    )
    if message is None:
        assert first.finish_reason == "length" and first.error is None
    else:
        failed(first, "no_token_allowed", message)
    assert second.error is None


def test_a_grammar_that_cannot_go_on(shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Grammar, "consume", lambda self, tokens: self.matcher.consume_tokens([5] * len(tokens))
    )
    [completion] = shared(LLAMA).generate(
        [TEXT], SamplingParams(max_tokens=8, structured_output=StructuredOutput(regex="[a-c]{8}"))
    )
    failed(completion, "grammar_failed", "structured_output cannot go on: ")
    assert completion.error is not None and len(completion.error.message) > 40


def test_parameters_that_overflow(shared: Callable[..., LLM]) -> None:
    [completion] = shared(LLAMA).generate([TEXT], SamplingParams(max_tokens=4, repetition_penalty=1e-38))
    failed(completion, "parameters_overflow", "the model's logits were finite, but not what penalties")


def test_chunks_of_an_async_engine(make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_plain(LLAMA)
    poison(llm, monkeypatch, float("nan"), after=2)

    async def run() -> list[Chunk]:
        async with AsyncEngine(llm) as engine:
            return [
                chunk async for chunk in engine.stream(TEXT, SamplingParams(max_tokens=9, ignore_eos=True))
            ]

    *others, last = asyncio.run(run())
    failed(last, "invalid_logits", "NaN or infinite")
    assert all(chunk.error is None for chunk in others)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RankError("rank 1 died (killed by SIGKILL): 'collect' failed"), "rank_failed"),
        (ZeroDivisionError("division by zero"), "engine_failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_engine_that_dies(
    make_plain: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    llm = make_plain(LLAMA)

    def step() -> None:
        raise error

    async def run() -> list[ErrorInfo]:
        engine = AsyncEngine(llm)
        monkeypatch.setattr(llm.engine, "step", step)
        with pytest.raises(EngineDeadError) as first:
            await engine.generate(TEXT)
        with pytest.raises(EngineDeadError) as later:
            await engine.generate(TEXT)
        return [first.value.info, later.value.info]

    infos = asyncio.run(run())
    assert {info.code for info in infos} == {code}
    assert all(type(error).__name__ in info.message and str(error) in info.message for info in infos)


def test_memory_of_a_rank() -> None:
    """The rank's own exception is behind the driver's."""
    dead, rank = EngineDeadError("a step failed"), RankError("rank 1: 'collect' failed")
    dead.__cause__, rank.__cause__ = rank, torch.OutOfMemoryError("CUDA out of memory")
    assert dead.info == ErrorInfo("out_of_memory", "a step failed")


def test_memory_of_the_host_that_runs_out_is_recognized() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 52, dtype=torch.uint8)
    assert not isinstance(raised.value, torch.OutOfMemoryError)
    assert error_info(raised.value).code == "out_of_memory"
    assert error_info(RuntimeError("an illegal memory access")).code == "engine_failed"


@pytest.mark.parametrize("options", [{}, {"task": "embed"}], ids=str)
def test_a_model_that_does_not_fit(
    options: dict[str, Any], make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a mistake of the caller, with what takes less; any other failure stays what it is."""
    for error, expected, message in (
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is"
            ),
            UsageError,
            r"docs-llama does not fit in memory \(device 'cpu'\): CUDA out of memory. Tried to allocate 2.00 GiB. Less is taken by .*quant=",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            UsageError,
            "allocate memory. Less is taken by",
        ),
        (MemoryError(), UsageError, r"\(device 'cpu'\): MemoryError. Less is taken by"),
        (RuntimeError("a bug"), RuntimeError, "^a bug$"),
    ):

        def fail(*given: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(Weights, "tensor", fail)
        with pytest.raises(expected, match=message):
            make(LLAMA, **options)
