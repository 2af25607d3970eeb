"""Ray Data on a local cluster: the completions of `gristmill.LLM` row by row, refusals as errors or as a column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gristmill import LLM, SamplingParams
from gristmill.integrations.ray import Generate, resources
from gristmill.runtime.errors import UsageError
from tests.runtime.oracle import LLAMA, MODELS, eval_tokens

MODEL = str(MODELS / LLAMA)
OPTIONS = {"dtype": "fp32", "num_blocks": 256}
PARAMS = {"max_tokens": 8}
PROMPTS = [f"The {word} of" for word in ("value", "index", "name", "list", "type", "function", "table")]


@pytest.fixture(scope="module")
def expected(cluster: Any) -> Iterator[dict[str, tuple[str, list[int], str]]]:
    answers = LLM(MODEL, **OPTIONS).generate(PROMPTS, SamplingParams(**PARAMS))
    yield {p: (a.text, list(a.token_ids), a.finish_reason) for p, a in zip(PROMPTS, answers, strict=True)}


def run(cluster: Any, rows: list[dict[str, Any]], batch_size: int, **options: Any) -> list[dict[str, Any]]:
    named = {"model": MODEL, "params": PARAMS, "options": OPTIONS, **options}
    dataset = cluster.data.from_items(rows, override_num_blocks=1)
    result = dataset.map_batches(Generate, fn_constructor_kwargs=named, concurrency=1, batch_size=batch_size)
    taken: list[dict[str, Any]] = result.take_all()
    return taken


def test_rows_get_their_completions(cluster: Any, expected: dict[str, tuple[str, list[int], str]]) -> None:
    rows = run(cluster, [{"prompt": prompt, "number": i} for i, prompt in enumerate(PROMPTS)], batch_size=3)
    assert sorted(row["number"] for row in rows) == [*range(len(PROMPTS))]
    for row in rows:
        assert PROMPTS[row["number"]] == row["prompt"] and "error" not in row
        assert (row["generated_text"], [*row["generated_ids"]], row["finish_reason"]) == expected[
            row["prompt"]
        ]


def test_two_processes_share_the_model_of_an_actor(
    cluster: Any, expected: dict[str, tuple[str, list[int], str]]
) -> None:
    options = {**OPTIONS, "tensor_parallel": 2, "device": "cpu"}
    rows = run(cluster, [{"prompt": prompt} for prompt in PROMPTS], batch_size=4, options=options)
    assert {row["prompt"]: [*row["generated_ids"]] for row in rows} == {
        prompt: ids for prompt, (_, ids, _) in expected.items()
    }


def test_what_an_actor_asks_for(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources({}) == resources({"tensor_parallel": 2}) == {}  # this cluster has no GPU
    assert resources({"tensor_parallel": 2, "device": "cuda"}) == {"num_gpus": 2}
    monkeypatch.setattr(cluster, "cluster_resources", lambda: {"GPU": 4.0})
    assert resources({}) == {"num_gpus": 1} and resources({"device": "cpu"}) == {}


def test_token_ids_and_rows_that_are_refused(
    cluster: Any, expected: dict[str, tuple[str, list[int], str]]
) -> None:
    ids = LLM(MODEL, **OPTIONS).tokenizer.encode(PROMPTS[0])
    long = eval_tokens()[:4096]
    rows = [{"ids": ids}, {"ids": []}, {"ids": long}, {"ids": [99999]}]
    answers = run(cluster, rows, batch_size=4, prompt="ids", on_error="column")
    assert [*answers[0]["generated_ids"]] == expected[PROMPTS[0]][1] and answers[0]["error"] is None
    for row, message in zip(
        answers[1:], ("the prompt is empty", "can never run: 4096 prompt tokens", "got 99999"), strict=True
    ):
        assert message in row["error"] and row["generated_text"] == "" and row["finish_reason"] == "error"


@pytest.mark.parametrize(
    "options,message",
    [
        ({"prompt": "question"}, "the dataset has no column 'question'; its columns are prompt"),
        ({"params": {"max_token": 8}}, "SamplingParams has no max_token; known: "),
    ],
)
def test_a_job_that_ends(cluster: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        run(cluster, [{"prompt": "The"}], batch_size=1, **options)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"params": {"n": 2}}, "a row has one completion: n must be 1, got 2"),
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'column', got 'ignore'"),
        ({"params": [1]}, "params must map names to values, got list"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Generate(MODEL, **options)
