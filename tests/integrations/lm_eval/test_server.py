"""The harness's API model over the server: its log-likelihoods and texts are those of our own model in the harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from gristmill import LLM
from tests.runtime.oracle import LLAMA, MODELS
from tests.serve.server import LocalEngine, service_of, serving
from tests.serve.test_rules import wait_for

NEAR = 1e-3
PAIRS = [("The function returns", " a copy of the input."), ("", "The index"), ("Values are", " é ☃ 12")]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    """(the harness's model over a server, what the server serves)."""
    folder = tmp_path_factory.mktemp("gristmill")
    (folder / "policy.toml").write_text(f'cache = "{folder}"\n')
    llm = LLM(MODELS / LLAMA, dtype="fp32", device="cpu", warm="off", policy=folder / "policy.toml")
    with serving(service_of(llm), lambda service: LocalEngine(llm)) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        yield (
            get_model("local-completions")(
                model="docs-llama",
                base_url=f"{url}/v1/completions",
                tokenizer=tokenizer(folder),
                tokenizer_backend="huggingface",
                num_concurrent=2,
                max_retries=1,
            ),
            llm,
        )


def tokenizer(folder: Path) -> str:
    """A directory that transformers reads the tokenizer from."""
    import json

    (folder / "tokenizer.json").write_bytes((MODELS / LLAMA / "tokenizer.json").read_bytes())
    names = {
        t["id"]: t["content"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names[0], "eos_token": names[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def test_log_likelihoods(harness: tuple[Any, LLM]) -> None:
    """Equal to those that prompt_logprobs of the same ids have; whether greedy decoding gives the text, too."""
    model, _ = harness
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in PAIRS[:1] + PAIRS[2:]]
    got = model.loglikelihood(requests)
    for (context, continuation), (value, greedy) in zip(PAIRS[:1] + PAIRS[2:], got, strict=True):
        entries = model.tok_encode(context), model.tok_encode(context + continuation)
        count = len(entries[1]) - len(entries[0])
        answer = httpx.post(
            model.base_url,
            json={"model": "docs-llama", "prompt": entries[1], "max_tokens": 1, "prompt_logprobs": 0},
            timeout=60,
        ).json()
        rows = answer["choices"][0]["prompt_logprobs"][-count:]
        chosen = [row[str(token)] for row, token in zip(rows, entries[1][-count:], strict=True)]
        assert abs(sum(one["logprob"] for one in chosen) - value) < NEAR
        assert greedy == all(one["rank"] == 1 for one in chosen)


def test_texts(harness: tuple[Any, LLM]) -> None:
    """Greedy texts up to a stop string."""
    model, _ = harness
    request = Instance(
        "generate_until",
        {},
        ("The function returns", {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}),
        0,
    )
    assert model.generate_until([request]) == [" a copy of the input."]
