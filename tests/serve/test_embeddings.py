"""Embeddings and scores over HTTP: the openai package, the published shapes, rerank and pairs, refusals, clients that leave."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from openai.types import CreateEmbeddingResponse

from gristmill import LLM
from gristmill.runtime.engine_config import EngineConfig
from gristmill.serve.config import ServeConfig
from gristmill.serve.engines import open_engines
from gristmill.serve.launch import make_service
from tests.runtime.pooling.encoder_cases import build, text, write_modules, write_tokenizer
from tests.serve.server import LocalEngine, service_of, serving, until_ready
from tests.serve.shapes import validated

TEXTS = [text(3), text(7, 2), text(1, 5)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A small encoder."""
    folder = tmp_path_factory.mktemp("bert")
    build("bert", folder)
    write_tokenizer(folder)
    return LLM(folder, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def expected(encoder: LLM) -> list[Any]:
    """What the model gives without a server."""
    return [one.vector for one in encoder.embed(TEXTS)]


@pytest.fixture(scope="module")
def scores(encoder: LLM) -> list[float]:
    """Of the first text with the others."""
    return [one.score for one in encoder.score(TEXTS[0], TEXTS[1:])]


@pytest.fixture(scope="module")
def embedding_url(encoder: LLM, expected: list[Any], scores: list[float]) -> Iterator[str]:
    """The address of its server."""
    service = service_of(encoder, served_model_name=["small"])
    with serving(service, lambda service: LocalEngine(encoder)) as address:
        until_ready(service)
        yield address


def post(url: str, path: str, **body: Any) -> httpx.Response:
    """A request."""
    return httpx.post(url + path, json=body, timeout=60)


def near(vector: Any, other: Any) -> bool:
    """Whether two vectors are the same within rounding."""
    return float(np.abs(np.asarray(vector, dtype=np.float32) - other).max()) < 1e-5


def test_the_openai_package(embedding_url: str, expected: list[Any]) -> None:
    """Which asks for base64 by itself; sync and async."""
    client = openai.OpenAI(base_url=f"{embedding_url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="small", input=TEXTS)
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert all(near(one.embedding, known) for one, known in zip(answer.data, expected, strict=True))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    cut = client.embeddings.create(model="small", input=TEXTS[0], dimensions=16, encoding_format="float")
    assert near(cut.data[0].embedding, expected[0][:16])
    part = expected[0][:16] / np.linalg.norm(expected[0][:16])
    unit = client.embeddings.create(
        input=TEXTS[0], model="small", dimensions=16, extra_body={"normalize": True}
    )
    assert near(unit.data[0].embedding, part)
    with pytest.raises(openai.BadRequestError, match="dimensions must be from 1 to"):
        client.embeddings.create(model="small", input=TEXTS[0], dimensions=4096)
    with pytest.raises(openai.NotFoundError, match="large"):
        client.embeddings.create(model="large", input=TEXTS[0])


def test_shapes_and_forms_of_the_input(embedding_url: str, encoder: LLM, expected: list[Any]) -> None:
    """A text, token ids, several of either; numbers and base64 are the same."""
    ids = [encoder.tokenizer.encode(one) for one in TEXTS]
    for given, count in ((TEXTS[0], 1), (TEXTS, 3), (ids[0], 1), (ids, 3)):
        body = post(embedding_url, "/v1/embeddings", input=given).json()
        assert validated(CreateEmbeddingResponse, body) == set()
        assert len(body["data"]) == count and near(body["data"][0]["embedding"], expected[0])
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids[:count]))
    coded = post(embedding_url, "/v1/embeddings", input=TEXTS[1], encoding_format="base64").json()
    vector = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), dtype="<f4")
    assert near(vector, expected[1])
    assert not near(vector, expected[0])  # the check tells texts apart


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input must be 1 to 2048 texts, got 0"),
        ({"input": ["a"] * 2049}, "input must be 1 to 2048 texts, got 2049"),
        ({"input": ["a", [1]]}, "a list of both|token ids|text"),
        ({"input": ["a", 1]}, "not a mixture"),
        ({"input": [10**6]}, "token ids must be from 0 to"),
        ({"input": [[]]}, "the text is empty"),
        ({"input": " ".join(["a"] * 4000)}, "is longer than"),
        ({"input": "a", "encoding_format": "ubinary"}, "encoding_format must be one of float, base64"),
        ({"input": "a", "truncate_prompt_tokens": 12}, "truncate_prompt_tokens must be -1"),
        ({"input": "a", "prompt_name": "query"}, "has no prompt 'query'"),
        ({"input": {"a": 1}}, "invalid request"),
    ],
    ids=str,
)
def test_what_is_refused(embedding_url: str, body: dict[str, Any], message: str) -> None:
    """With a 400 that says what is wrong; a mixture of texts and lists of ids is taken."""
    answer = post(embedding_url, "/v1/embeddings", **body)
    if body == {"input": ["a", [1]]}:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_long_texts_are_cut_where_that_is_asked_for(embedding_url: str) -> None:
    """By either name."""
    long = " ".join(["a"] * 4000)
    for more in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        body = post(embedding_url, "/v1/embeddings", input=long, **more).json()
        assert body["usage"]["prompt_tokens"] == 320


def test_rerank_and_pairs(embedding_url: str, scores: list[float]) -> None:
    """Jina's and Cohere's fields, and vLLM's pairs, with the scores of the model."""
    best = int(np.argmax(scores))
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        documents = [TEXTS[1], {"text": TEXTS[2]}]
        body = post(embedding_url, path, query=TEXTS[0], documents=documents).json()
        assert [one["index"] for one in body["results"]] == [best, 1 - best]
        assert [one["relevance_score"] for one in body["results"]] == pytest.approx(
            sorted(scores, reverse=True), abs=1e-5
        )
        assert body["results"][0]["document"] == {"text": TEXTS[1 + best]}
        assert body["usage"]["total_tokens"] > 0
    body = post(
        embedding_url, "/rerank", query=TEXTS[0], documents=TEXTS[1:], top_n=1, return_documents=False
    ).json()
    assert [list(one) for one in body["results"]] == [["index", "relevance_score"]]
    for path in ("/score", "/v1/score"):
        body = post(embedding_url, path, text_1=TEXTS[0], text_2=TEXTS[1:]).json()
        assert [one["score"] for one in body["data"]] == pytest.approx(scores, abs=1e-5)
    for fields, message in (
        ({"text_1": TEXTS[:2], "text_2": TEXTS}, "2"),
        ({"text_1": [], "text_2": TEXTS}, "text_1 must be 1 to"),
        ({"text_1": TEXTS[0]}, "text_2"),
    ):
        answer = post(embedding_url, "/score", **fields)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_late_interaction(tmp_path: Path) -> None:
    """A vector for each token, as numbers; scores and rankings as of other models."""
    build("bert", tmp_path)
    write_tokenizer(tmp_path)
    dense = {"in_features": 64, "out_features": 16, "bias": False, "activation_function": "torch.nn.Identity"}
    dense["linear.weight"] = torch.randn(16, 64)
    late = {"query_prefix": "w250", "document_prefix": "w251", "query_length": 12, "document_length": 40}
    write_modules(
        tmp_path,
        None,
        [dense],
        prompts={**late, "similarity_fn_name": "MaxSim"},
        package="pylate.models.Dense",
    )
    llm = LLM(tmp_path, dtype="fp32", device="cpu")
    (known,) = llm.embed(TEXTS[1], prompt_name="document")
    scores = [one.score for one in llm.score(TEXTS[0], TEXTS[1:])]
    service = service_of(llm)
    with serving(service, lambda service: LocalEngine(llm)) as address:
        until_ready(service)
        asked = {"input": TEXTS[1], "prompt_name": "document"}
        (found,) = post(address, "/v1/embeddings", **asked).json()["data"]
        assert near(found["embedding"], known.vector) and np.shape(found["embedding"])[1] == 16
        refused = post(address, "/v1/embeddings", **asked, encoding_format="base64")
        assert refused.status_code == 400 and "a vector for each token" in refused.json()["error"]["message"]
        body = post(address, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:]).json()
        assert [one["score"] for one in body["data"]] == pytest.approx(scores, abs=1e-5)


def test_models_are_for_one_or_the_other(embedding_url: str, url: str) -> None:
    """Routes of the other kind say what to do; health, state, kernels and metrics are there for both."""
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "model": "m"}),
    ):
        answer = post(embedding_url, path, **body)
        assert answer.status_code == 400, (path, answer.text)
        assert "generates no text: use /v1/embeddings" in answer.json()["error"]["message"]
    for path, body in (
        ("/v1/embeddings", {"input": "Hello"}),
        ("/v1/rerank", {"query": "Hello", "documents": ["a"]}),
        ("/score", {"text_1": "Hello", "text_2": "a"}),
    ):
        answer = post(url, path, **body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "model_not_supported"
    assert httpx.get(f"{embedding_url}/ready").status_code == 200
    state = httpx.get(f"{embedding_url}/ui/state").json()
    assert state["pools"] is True and state["engines"][0]["weight_bytes"] > 0
    assert not httpx.get(f"{url}/ui/state").json()["pools"]
    kernels = httpx.get(f"{embedding_url}/ui/kernels").json()["kernels"]
    assert "layer_norm" in {row["op"] for row in kernels}
    assert post(embedding_url, "/tokenize", prompt="a b").json()["count"] > 0


def test_a_client_that_leaves(encoder: LLM) -> None:
    """What is in no batch yet is dropped."""
    llm = LLM(encoder.path, dtype="fp32", device="cpu")
    gate, engine = threading.Event(), llm.pooling.engine
    compute = engine.compute

    def held(inputs: Any) -> Any:
        assert gate.wait(30)
        return compute(inputs)

    engine.compute = held  # type: ignore[method-assign]
    service = service_of(llm)
    with serving(service, lambda service: LocalEngine(llm)) as address:
        until_ready(service)
        first = threading.Thread(target=post, args=(address, "/v1/embeddings"), kwargs={"input": TEXTS[0]})
        first.start()
        wait_for(lambda: not engine.waiting and engine.has_unfinished())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/embeddings", json={"input": TEXTS}, timeout=0.3)
        wait_for(lambda: len(service.active) == 1)
        gate.set()
        first.join()
        wait_for(lambda: not engine.has_unfinished())


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Until it holds; TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


def test_with_the_engine_in_a_process_of_its_own(encoder: LLM, expected: list[Any]) -> None:
    """As `gristmill serve` starts it."""
    options = {"device": "cpu", "dtype": "fp32", "warm": "off"}
    config = ServeConfig(port=0, log_file="/dev/null")
    service = make_service(encoder.path, config, EngineConfig.of(options))
    assert service.pools and service.max_model_len == 320
    with serving(service, open_engines(encoder.path, options)) as address:
        until_ready(service)
        body = post(address, "/v1/embeddings", input=TEXTS).json()
        assert all(near(one["embedding"], known) for one, known in zip(body["data"], expected, strict=True))
        capacity = httpx.get(f"{address}/capacity").json()
        assert capacity["engines"][0]["state"] == "running"
