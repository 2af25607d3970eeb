"""Next-token probabilities: against those that the engine finds for the labels as parts of prompts."""

from __future__ import annotations

import json
import math
import socket
import time
from typing import Any

import httpx
import pytest

from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.serve.routes import scoring
from tests.serve.server import MODEL
from tests.serve.stage import HTTP, stage
from tests.serve.test_rules import wait_for

QUERY = "The function returns"
ITEMS = [" a copy of", " the", " the index of the first", ""]
LABELS = [4095, 262, 10, 3000, 262]
"""Likely and very unlikely ones, and one twice."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The model's."""
    return Tokenizer(MODEL)


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    """A request."""
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | fields
    return HTTP.post(url + path, json=body, timeout=60)


def expected(url: str, ids: list[int]) -> list[float]:
    """The probabilities of the labels, each as the last token of a prompt of its own."""
    found = []
    for label in LABELS:
        body = {"prompt": [*ids, label], "max_tokens": 1, "prompt_logprobs": 0}
        answer = HTTP.post(f"{url}/v1/completions", json=body, timeout=60).json()
        found.append(math.exp(answer["choices"][0]["prompt_logprobs"][-1][str(label)]["logprob"]))
    return found


@pytest.fixture(scope="module")
def probabilities(url: str, tokenizer: Tokenizer) -> list[list[float]]:
    """Of the labels after each item."""
    query = tokenizer.encode(QUERY)
    return [expected(url, [*query, *tokenizer.encode(item, False)]) for item in ITEMS]


@pytest.mark.parametrize("candidates", [scoring.CANDIDATES, 1])
def test_probabilities_are_exact(
    url: str, probabilities: list[list[float]], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a label is among the most likely tokens or not."""
    monkeypatch.setattr(scoring, "CANDIDATES", candidates)
    answer = post(url, "/generative_scoring", apply_softmax=False)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    rows = [one["probabilities"] for one in body["data"]]
    assert close(rows, probabilities)
    assert [one["score"] for one in body["data"]] == [row[0] for row in rows]
    assert [one["index"] for one in body["data"]] == list(range(len(ITEMS)))
    assert body["usage"]["completion_tokens"] == len(ITEMS)
    assert not close(rows[1:] + rows[:1], probabilities)  # the check tells prompts apart
    assert not close([row[1:] + row[:1] for row in rows], probabilities)  # and labels


def close(rows: list[list[float]], others: list[list[float]]) -> bool:
    """Whether all are the same within rounding."""
    pairs = zip(sum(rows, []), sum(others, []), strict=True)
    return all(math.isclose(a, b, rel_tol=1e-4) for a, b in pairs)


def test_softmax_is_among_the_labels(url: str, probabilities: list[list[float]]) -> None:
    """vLLM's default; SGLang's is off."""
    relative = [[one / sum(row) for one in row] for row in probabilities]
    rows = [one["probabilities"] for one in post(url, "/generative_scoring").json()["data"]]
    assert close(rows, relative)
    answer = post(url, "/v1/score", apply_softmax=True).json()
    assert close(answer["scores"], relative)
    assert set(answer) == {"object", "scores", "model", "usage"} and answer["object"] == "scoring"


def test_forms_of_prompts(url: str, tokenizer: Tokenizer) -> None:
    """Texts are joined before they are tokenized for /v1/score, ids after for the other; items may come first."""
    query, item = tokenizer.encode("The fun"), tokenizer.encode("ction", False)
    whole, begin = tokenizer.encode("The function"), tokenizer.encode("", True)
    assert [*query, *item] != whole
    options: dict[str, Any] = {"query": "The fun", "items": "ction", "apply_softmax": False}
    assert close(post(url, "/v1/score", **options).json()["scores"], [expected(url, whole)])
    parts = post(url, "/generative_scoring", **options).json()["data"][0]["probabilities"]
    assert close([parts], [expected(url, [*query, *item])])
    ids = post(url, "/v1/score", **options | {"query": query, "items": [item]}).json()["scores"]
    assert close(ids, [expected(url, [*query, *item])])
    first = post(url, "/generative_scoring", **options, item_first=True).json()["data"][0]["probabilities"]
    assert close([first], [expected(url, [*begin, *item, *tokenizer.encode("The fun", False)])])
    first = post(url, "/v1/score", **options | {"query": "ction", "items": "The fun"}, item_first=True)
    assert close(first.json()["scores"], [expected(url, whole)])


@pytest.mark.parametrize("path", ["/generative_scoring", "/v1/score"])
@pytest.mark.parametrize(
    "fault",
    [
        {"label_token_ids": None},
        {"label_token_ids": []},
        {"label_token_ids": [-1]},
        {"label_token_ids": [10**9]},
        {"label_token_ids": ["yes"]},
        {"label_token_ids": list(range(300))},
        {"query": None},
        {"query": [10**9]},
        {"query": ["a"]},
        {"items": None},
        {"items": []},
        {"items": [1]},
        {"items": [[-1]]},
        {"items": ["a"] * 200},
        {"items": ["word " * 20000]},
        {"query": [], "items": [[]]},
        {"apply_softmax": "yes"},
    ],
)
def test_malformed_requests(url: str, path: str, fault: dict[str, Any]) -> None:
    """400, in the shape of OpenAI's API."""
    answer = post(url, path, **fault)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert post(url, path, model="another").status_code == 404


def test_requests_of_one_client_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many at a time reach the engine, and all end when the client leaves."""
    with stage() as scripted:
        scripted.plays("", "hang")
        body = json.dumps({"query": "a", "items": ["b"] * 40, "label_token_ids": [1]}).encode()
        head = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        host, port = scripted.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head + body)
            wait_for(lambda: len(scripted.engine.seen) >= scoring.AT_ONCE)
            time.sleep(0.1)
        assert len(scripted.engine.seen) == scoring.AT_ONCE
        assert scripted.engine.seen[0][1] == SamplingParams(max_tokens=1, logprobs=scoring.CANDIDATES)
    assert scripted.engine.left == scoring.AT_ONCE
