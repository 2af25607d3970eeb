"""Every family on the GPU, compared with transformers as `tests/runtime` compares it on the CPU: in float32 by the same checks, and in bfloat16
by the error that transformers itself has in bfloat16 on this device.

A case whose shapes no kernel of the device serves fails; nothing here is skipped. What runs of these tests proved is in RECORD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import window_logits
from tests.runtime import family_cases, oracle, producers
from tests.runtime.engines import maker, run_policy
from tests.runtime.pooling import (
    encoder_cases,
    test_classes,
    test_colbert,
    test_decoders,
    test_encoders,
    test_late_interaction,
    test_modules,
    test_scoring,
)
from tests.runtime.proofs import proves, values
from tests.runtime.test_families import IDS, LIMITS, PARAMS, PROMPTS, Expected, check_family

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
RECORD = "bench/results/h200/pytest_gpu.json"
WITHOUT_GRAPHS: dict[str, Any] = {"decode_graphs": False, "prompt_graphs": 0}
EXCESS = 1.5
"""The largest mean square of an error in bfloat16, as a multiple of that of transformers' result. Both round the same weights, and activations at
much the same places; they differ in the order of additions and in what fused kernels do not round, so the errors are two draws of one size."""
EXCESS_OF_EXPERTS, EXCESS_OF_HALF = 4.0, 2.0
"""The same where there are experts, and for the median of the tokens' mean squares. Rounding gives a few tokens other experts than in float32,
not the same ones here and there; their errors are far over the median and make up nearly all of the mean."""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return run_policy(tmp_path_factory)


@pytest.fixture(scope="session")
def make(policy: Policy) -> Callable[..., LLM]:
    return maker(policy, DEVICE)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """transformers computes small models on the CPU in many processes at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def captured(llm: LLM) -> bool:
    """Whether steps have run as graphs."""
    return any(row["captured"] for row in llm.explain_graphs())


@proves("logits and ids", "a GPU", family_cases.ARCHITECTURES, record=RECORD)
@pytest.mark.parametrize("name", family_cases.CASES)
def test_float32(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    expected = Expected(family_cases.build(name, tmp_path))
    for graphs in (True, False):
        llm = make(tmp_path, **LIMITS, **({} if graphs else WITHOUT_GRAPHS))
        check_family(name, llm, expected)
        assert captured(llm) == graphs


@pytest.mark.parametrize("name", family_cases.CASES)
def test_bfloat16(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = family_cases.build(name, tmp_path)
    expected = oracle.logits(model, IDS)
    llm = make(tmp_path, dtype="bf16", **LIMITS)
    ours = window_logits(llm.engine, IDS).cpu()
    answers = [done.token_ids for done in llm.generate(PROMPTS, PARAMS)]
    assert captured(llm)
    exact = torch.cat(
        [oracle.logits(model, [*p, *ids])[len(p) - 1 : -1] for p, ids in zip(PROMPTS, answers, strict=True)]
    )
    model.set_experts_implementation("eager")
    theirs = oracle.logits(model.to(DEVICE, torch.bfloat16), IDS)
    share = 1.0
    if llm.config.moe is None:
        assert oracle.excess(ours, theirs, expected) < EXCESS
    else:
        share = 0.5
        assert oracle.excess(ours, theirs, expected) < EXCESS_OF_EXPERTS
        own, other = ((each - expected).square().mean(1).median() for each in (ours, theirs))
        assert float(own / other) < EXCESS_OF_HALF
    # An id that is not the best one in float32 lacks no more than the errors of both logits.
    chosen = exact.gather(1, torch.tensor([id for ids in answers for id in ids])[:, None])[:, 0]
    lacking, errors = exact.amax(1) - chosen, (theirs - expected).abs().amax(1)
    assert float(lacking.quantile(share)) <= 2 * EXCESS * float(errors.quantile(share))


@pytest.mark.parametrize("name", family_cases.CASES)
def test_graphs_in_bfloat16(name: str, make: Callable[..., LLM], policy: Policy, tmp_path: Path) -> None:
    """The ids of steps kernel by kernel, where a row's bits do not depend on the padding of a step."""
    family_cases.build(name, tmp_path)
    options = {"dtype": "bf16", "policy": replace(policy, batch_invariant=True), **LIMITS}
    without, through = make(tmp_path, **options, **WITHOUT_GRAPHS), make(tmp_path, **options)
    expected = [done.token_ids for done in without.generate(PROMPTS, PARAMS)]
    for _ in range(2):  # the second round replays, and begins in the prefix cache
        assert [done.token_ids for done in through.generate(PROMPTS, PARAMS)] == expected
    assert captured(through) and not captured(without)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_ids_of_a_gguf_file(kind: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Those of transformers with the values in the file, in float32."""
    path, plain = producers.gguf_file(oracle.LLAMA, tmp_path, {"_proj": kind, "embed_tokens": kind})
    model, prompts = oracle.load(plain), oracle.prompts()[2:18:3]
    answers = [oracle.answer_of(model, given, 32) for given in prompts]
    for options in ({}, WITHOUT_GRAPHS):
        compared = oracle.Comparison(kind)
        llm = make(path, activations="float", **options)
        for done, answer in zip(llm.generate(prompts, SamplingParams(max_tokens=32)), answers, strict=True):
            compared.add(done.token_ids, answer)
        compared.finish()


@proves("logits and ids", "a GPU", encoder_cases.ARCHITECTURES, record=RECORD)
@pytest.mark.parametrize("name", encoder_cases.CASES)
def test_encoders_in_float32(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    test_encoders.test_hidden_states(name, make, tmp_path)
    if "classifier" in name:
        test_encoders.test_logits_of_classes(name, make, tmp_path)


@pytest.mark.parametrize("name", encoder_cases.CASES)
def test_encoders_in_bfloat16(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model = encoder_cases.build(name, tmp_path)
    tokens = [encoder_cases.ids(length, 3 * length) for length in encoder_cases.LENGTHS]
    expected = torch.cat([encoder_cases.hidden_states(model, each) for each in tokens])
    ours = torch.cat(test_encoders.encoded(test_encoders.encoder(make(tmp_path, dtype="bf16")), tokens))
    half = model.to(DEVICE, torch.bfloat16)
    theirs = torch.cat([encoder_cases.hidden_states(half, each) for each in tokens])
    assert oracle.excess(ours, theirs, expected) < EXCESS


@pytest.mark.parametrize("name", values(test_decoders.test_families_over_whole_sequences, "name"))
def test_decoders_over_whole_sequences(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    test_decoders.test_families_over_whole_sequences(name, make, tmp_path)


POOLED: dict[str, Callable[[Callable[..., LLM], Path], None]] = {
    "a bidirectional decoder": partial(test_decoders.test_a_bidirectional_decoder, "TextModel"),
    "embeddings of a decoder": partial(test_decoders.test_embeddings_of_qwen, "Model", False),
    "a classifier over a decoder": test_decoders.test_a_classifier_over_a_decoder,
    "classes": partial(test_classes.test_what_becomes_of_the_logits, None),
    "pairs of texts": test_classes.test_pairs_ids_and_long_texts,
    "scores": lambda make, folder: test_scoring.test_cross_encoder(test_scoring.cross_encoder(make, folder)),
    "dense layers": test_modules.test_dense_then_cut_then_length_1,
}
POOLED |= {
    f"like {name}": partial(test_modules.test_directories_like_published_ones, name)
    for name in test_modules.PUBLISHED
}
POOLED |= {
    f"ColBERT, {name}": partial(test_colbert.test_vectors_and_scores, name) for name in test_colbert.CASES
}


@pytest.mark.parametrize("name", POOLED)
def test_pooled(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Vectors, classes and scores: what `LLM` returns, in float32."""
    POOLED[name](make, tmp_path)


@pytest.mark.parametrize("name", test_late_interaction.ENCODERS)
def test_late_interaction_of_tokens(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    test_late_interaction.test_vectors_and_scores(test_late_interaction.write(name, tmp_path), make)


def test_answers_to_a_question(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_decoders.test_the_answer_yes(False, make, tmp_path, monkeypatch)
