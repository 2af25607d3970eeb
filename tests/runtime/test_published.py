"""Published GGUF files: ids and conversations equal to transformers' reading in float32, and llama.cpp's loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.runtime.chat.conversation import Message
from gristmill.runtime.default_model import ModelUnavailableError, default_model
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import window_logits
from tests.runtime.published import gemma

QUESTIONS = ("What is a gristmill?", "Name three rivers.", "2 + 2 =", "Say hello in French.")
TEXTS = (
    "The river rose, and the miller",
    "def factorial(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "In the year 1815",
)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
LICENSE = Path(__file__).parents[2] / "LICENSE"
LLAMA_CPP = 2.3170
"""The loss of LICENSE in nats per token: ln of the perplexity that `llama-perplexity -m FILE -f LICENSE -c 512` prints, 10.1452, of llama.cpp
0c1e570."""


def in_transformers(path: Path) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer, as transformers reads the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **given)
    return model.eval(), AutoTokenizer.from_pretrained(str(path.parent), **given)


def answer_of(model: Any, ids: list[int]) -> list[int]:
    """Its greedy continuation."""
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=GREEDY.max_tokens, do_sample=False)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


@pytest.mark.slow
def test_smollm2_talks_as_in_transformers(make: Callable[..., LLM]) -> None:
    """Its chat template, its tokenizer and its greedy answers, with weights dequantized to float32 as there."""
    try:
        path = default_model()
    except ModelUnavailableError as error:
        pytest.skip(f"not run: {error}")
    model, tokenizer = in_transformers(path)
    llm = make(path, quant="float32")
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert llm.conversations.encode([Message("user", question)]) == ids
        expected = answer_of(model, ids)
        assert list(llm.generate([ids], GREEDY)[0].token_ids) == expected
        shown = tokenizer.decode(expected, skip_special_tokens=True)
        assert llm.chat(messages, GREEDY).message.content == shown


@pytest.mark.slow
def test_gemma_says_what_it_says_in_transformers(make: Callable[..., LLM]) -> None:
    """Of the ids that our tokenizer and llama.cpp's give, which transformers' conversion of the file's tokenizer does not."""
    path = gemma()
    model, _ = in_transformers(path)
    llm = make(path, quant="float32")
    for text in TEXTS:
        ids = llm.tokenizer.encode(text)
        assert list(llm.generate([ids], GREEDY)[0].token_ids) == answer_of(model, ids)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "auto"}, {"quant": "float32"}], ids=str)
def test_gemma_has_the_loss_of_llama_cpp(options: dict[str, str], make: Callable[..., LLM]) -> None:
    """As llama-perplexity counts it: the second half of windows of 512 tokens, each beginning with <bos>."""
    llm = make(gemma(), num_blocks=512, **options)
    ids = llm.tokenizer.encode(LICENSE.read_text())
    losses = []
    for first in range(0, len(ids) - 511, 512):
        window = [ids[0], *ids[first + 1 : first + 512]]
        logprobs = window_logits(llm.engine, window)[256:511].float().log_softmax(-1)
        losses.append(-logprobs.gather(1, torch.tensor(window[257:])[:, None]))
    assert len(losses) == 4
    assert float(torch.cat(losses).mean()) == pytest.approx(LLAMA_CPP, abs=0.01)
