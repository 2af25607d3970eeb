"""POST /classify over HTTP: vLLM's fields, token ids and pairs, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gristmill import LLM
from tests.runtime.pooling.encoder_cases import build, ids, text, write_tokenizer
from tests.serve.server import LocalEngine, service_of, serving, until_ready

TEXTS = [text(3), text(7, 2), text(1, 5)]
LABELS = {0: "sad", 1: "glad", 2: "neither"}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """One of three classes."""
    folder = tmp_path_factory.mktemp("classifier")
    build("bert classifier", folder, id2label=LABELS)
    write_tokenizer(folder)
    return LLM(folder, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def expected(classifier: LLM) -> dict[str, Any]:
    """What the model gives without a server, and beside it the logits."""
    pair: Any = [(TEXTS[0], TEXTS[1])]
    return {
        "probs": [one.values.tolist() for one in classifier.classify(TEXTS)],
        "labels": [one.label for one in classifier.classify(TEXTS)],
        "logits": [one.values.tolist() for one in classifier.classify(TEXTS, activation="none")],
        "pair": [one.values.tolist() for one in classifier.classify(pair)],
        "ids": [one.values.tolist() for one in classifier.classify([ids(4)])],
    }


@pytest.fixture(scope="module")
def class_url(classifier: LLM, expected: dict[str, Any]) -> Iterator[str]:
    """The address of its server."""
    service = service_of(classifier, served_model_name=["small"])
    with serving(service, lambda service: LocalEngine(classifier)) as address:
        until_ready(service)
        yield address


def post(url: str, path: str, **body: Any) -> httpx.Response:
    """A request."""
    return httpx.post(url + path, json=body, timeout=60)


def probabilities(body: dict[str, Any]) -> list[Any]:
    """Of each text, compared within rounding."""
    return [pytest.approx(one["probs"], abs=1e-5) for one in body["data"]]


def test_fields(class_url: str, expected: dict[str, Any]) -> None:
    """Those of vLLM's server, under both paths."""
    for path in ("/classify", "/v1/classify"):
        body = post(class_url, path, model="small", input=TEXTS).json()
        assert set(body) == {"id", "object", "created", "model", "data", "usage"}
        assert (body["object"], body["model"]) == ("list", "small")
        assert [set(one) for one in body["data"]] == [{"index", "label", "probs", "num_classes"}] * 3
        assert [one["index"] for one in body["data"]] == [0, 1, 2]
        assert [one["label"] for one in body["data"]] == expected["labels"]
        assert [one["num_classes"] for one in body["data"]] == [3, 3, 3]
        assert expected["probs"] == probabilities(body)
        assert expected["probs"][::-1] != probabilities(body)  # the check tells texts apart
        assert body["usage"] == {"prompt_tokens": 17, "total_tokens": 17}


def test_forms_of_the_input(class_url: str, expected: dict[str, Any]) -> None:
    """A text, token ids, several of either, a pair of texts; logits; a long text that is cut."""
    for given, known in (
        (TEXTS[0], expected["probs"][:1]),
        (ids(4), expected["ids"]),
        ([ids(4)], expected["ids"]),
        ([TEXTS[0], ids(4)], [expected["probs"][0], *expected["ids"]]),
        ([TEXTS[:2]], expected["pair"]),
    ):
        assert known == probabilities(post(class_url, "/classify", input=given).json())
    body = post(class_url, "/classify", input=TEXTS, use_activation=False).json()
    assert expected["logits"] == probabilities(body)
    body = post(class_url, "/classify", input=text(400), truncate_prompt_tokens=-1).json()
    assert body["usage"]["prompt_tokens"] == 320


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input must be 1 to 2048 texts, got 0"),
        ({"input": ["a", 1]}, "not a mixture"),
        ({"input": [["a", "b", "c"]]}, "token ids, or a pair of texts"),
        ({"input": [["a", 1]]}, "token ids, or a pair of texts"),
        ({"input": [10**6]}, "token ids must be from 0 to"),
        ({"input": [[]]}, "the text is empty"),
        ({"input": text(400)}, "is longer than"),
        ({"input": "a", "use_activation": 5}, "invalid request"),
        ({"input": "a", "truncate_prompt_tokens": 12}, "truncate_prompt_tokens must be -1"),
    ],
    ids=str,
)
def test_what_is_refused(class_url: str, body: dict[str, Any], message: str) -> None:
    """With a 400 that says what is wrong."""
    answer = post(class_url, "/classify", **body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_models_that_do_not_classify(class_url: str, url: str, tmp_path_factory: Any) -> None:
    """A model that generates, one with one label, and other routes of a classifier."""
    answer = post(url, "/classify", input="a")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "model_not_supported"
    assert post(class_url, "/classify", input="a", model="large").status_code == 404
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        answer = post(class_url, path, **body)
        assert answer.status_code == 400 and "classify" in answer.json()["error"]["message"]
    folder = tmp_path_factory.mktemp("one")
    build("bert classifier", folder, num_labels=1)
    write_tokenizer(folder)
    llm = LLM(folder, dtype="fp32", device="cpu")
    service = service_of(llm)
    with serving(service, lambda service: LocalEngine(llm)) as address:
        until_ready(service)
        answer = post(address, "/classify", input="a")
        assert answer.status_code == 400
        assert "one label, which is a score" in answer.json()["error"]["message"]
