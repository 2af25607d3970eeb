"""Requests of Dynamo as parameters, chunks as Dynamo takes them, refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill import Chunk, SamplingParams, StructuredOutput, TokenLogprobs
from gristmill.integrations.dynamo.requests import chunk_of, sampling_params
from gristmill.runtime.errors import UsageError


def test_every_option_that_is_served() -> None:
    request = {
        "token_ids": [1, 2],
        "sampling_options": {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 1.5,
            "seed": 3,
            "n": 2,
            "best_of": 1,
            "use_beam_search": False,
            "length_penalty": None,
            "logit_bias": {"7": -1.0},
        },
        "stop_conditions": {
            "max_tokens": 9,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop": ["x"],
            "stop_token_ids": [4],
            "stop_token_ids_hidden": [5],
        },
        "output_options": {"logprobs": "3", "prompt_logprobs": 0, "skip_special_tokens": True},
    }
    assert sampling_params(request, 100) == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        seed=3,
        n=2,
        logit_bias={7: -1.0},
        min_tokens=2,
        ignore_eos=True,
        stop=["x"],
        stop_token_ids=[4, 5],
        logprobs=3,
        prompt_logprobs=0,
    )


def test_what_nobody_chose() -> None:
    assert sampling_params({"token_ids": [1]}, 77) == SamplingParams(max_tokens=77, temperature=1.0)
    assert sampling_params({"token_ids": [1], "sampling_options": None}, -3).max_tokens == 1


@pytest.mark.parametrize(
    "guided,expected",
    [
        ({"json": {"type": "object"}, "backend": None}, StructuredOutput(json_schema={"type": "object"})),
        ({"regex": "a+"}, StructuredOutput(regex="a+")),
        ({"choice": ["a", "b"]}, StructuredOutput(choice=["a", "b"])),
        ({"grammar": 'start: "a"'}, StructuredOutput(grammar='start: "a"')),
    ],
)
def test_guided_decoding(guided: dict[str, Any], expected: StructuredOutput) -> None:
    assert sampling_params({"sampling_options": {"guided_decoding": guided}}, 9).structured_output == expected


@pytest.mark.parametrize(
    "request_,message",
    [
        ({"sampling_options": {"best_of": 2}}, "gristmill does not serve best_of = 2"),
        ({"sampling_options": {"use_beam_search": True}}, "does not serve use_beam_search = True"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "does not serve max_thinking_tokens = 5"),
        (
            {"sampling_options": {"guided_decoding": {"structural_tag": {}}}},
            "guided decoding by structural_tag",
        ),
        ({"sampling_options": {"top_p": 2.0}}, "top_p must be a number in"),
    ],
)
def test_refusals(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sampling_params(request_, 9)


def test_chunks() -> None:
    assert chunk_of(Chunk(0, (5, 6), "ab", choice=1), 3, 2) == {"token_ids": [5, 6], "index": 1}
    token = TokenLogprobs(5, -0.5, 2, ((9, -0.25), (5, -0.5)))
    last = chunk_of(
        Chunk(0, (5,), "a", "abort", logprobs=(token,), prompt_logprobs=(None, token)),
        prompt_tokens=2,
        tokens=4,
    )
    assert last == {
        "token_ids": [5],
        "index": 0,
        "finish_reason": "cancelled",
        "completion_usage": {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6},
        "log_probs": [-0.5],
        "top_logprobs": [
            [
                {"rank": 1, "token_id": 9, "token": None, "logprob": -0.25},
                {"rank": 2, "token_id": 5, "token": None, "logprob": -0.5},
            ]
        ],
        "engine_data": {
            "prompt_logprobs": [None, {"9": {"logprob": -0.25, "rank": 1}, "5": {"logprob": -0.5, "rank": 2}}]
        },
    }
