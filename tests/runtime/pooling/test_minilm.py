"""all-MiniLM-L6-v2 as it was published: embeddings equal to those from transformers' hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.runtime.llm import LLM
from tests.runtime.published import MINILM, directory

TEXTS = [
    "The index carries one published model of sentence-transformers.",
    "",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; naïve café.",
    "Two words",
    "A text that is long enough for several hundred tokens, " * 20,
]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 16}])
def test_embeddings(options: dict[str, Any], make: Callable[..., LLM]) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = directory(MINILM)
    llm = make(folder, **options)
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for text, made in zip(TEXTS, llm.embed(TEXTS, truncate=True), strict=True):
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        assert made.prompt_tokens == inputs["input_ids"].shape[1]
        with torch.no_grad():
            mean = model(**inputs).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=0).numpy()
        assert made.vector.dtype == np.float32 and float(np.abs(made.vector - expected).max()) < 1e-5


@pytest.mark.slow
def test_what_it_means(make: Callable[..., LLM]) -> None:
    """Of three texts the two that say the same are nearest."""
    llm = make(directory(MINILM))
    kitten, cat, rates = (
        each.vector
        for each in llm.embed(["A kitten sleeps.", "A small cat is asleep.", "Interest rates have risen."])
    )
    assert kitten @ cat > 0.6 > 0.3 > max(kitten @ rates, cat @ rates)
