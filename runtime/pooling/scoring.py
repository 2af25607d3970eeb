"""Scores of pairs of texts: by a classifier that reads both (cross-encoder), or by the embeddings of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.integers import described
from gristmill.runtime.pooling.engine import PoolingInput
from gristmill.runtime.pooling.front import Job, PoolingFront, shaped
from gristmill.runtime.pooling.pairs import Activation, PairInputs


@dataclass(frozen=True)
class Score:
    """How well a document answers a query: higher is better. `prompt_tokens`: tokens of both, with what the tokenizer adds."""

    score: float
    prompt_tokens: int


@dataclass(frozen=True)
class Ranked:
    """A document of a ranking.

    Attributes:
        index: its place among the documents that were given.
        score, prompt_tokens: as of `Score`.
    """

    index: int
    score: float
    prompt_tokens: int


class PairScorer:
    """A classifier with one class over both texts (Nogueira and Cho, 2019, arXiv:1901.04085).

    Args:
        activation: of its logit, where the caller names none.
    """

    def __init__(self, activation: Activation) -> None:
        self.activation = activation

    def inputs(
        self, front: PoolingFront, pairs: Sequence[tuple[str, str]], instruction: str | None, truncate: bool
    ) -> PairInputs:
        """As of `Scorer`: an input for each pair."""
        no_instruction(front, instruction)
        return PairInputs.joint([PoolingInput(ids, types) for ids, types in front.encode(pairs, truncate)])

    def scores(self, made: PairInputs, results: Sequence[Tensor], activation: Activation | None) -> Tensor:
        """As of `Scorer`."""
        logits = torch.cat([*results])
        return logits.sigmoid() if (activation or self.activation) == "sigmoid" else logits


class SimilarityScorer:
    """The similarity of two embeddings, by the function that the model's directory names: cosine if it names none."""

    def __init__(self, similarity: str) -> None:
        self.similarity = similarity

    def inputs(
        self, front: PoolingFront, pairs: Sequence[tuple[str, str]], instruction: str | None, truncate: bool
    ) -> PairInputs:
        """As of `Scorer`: query and document, each with the prompt of that name, if the model has one."""
        no_instruction(front, instruction)
        prompts = front.modules.prompts
        query, document = prompts.get("query", ""), prompts.get("document", prompts.get("passage", ""))
        return PairInputs.apart(
            pairs, lambda texts, asks: front.inputs(texts, query if asks else document, truncate)
        )

    def scores(self, made: PairInputs, results: Sequence[Tensor], activation: Activation | None) -> Tensor:
        """As of `Scorer`."""
        if activation is not None:
            raise UsageError("activation is of a classifier's logit, and this model compares embeddings")
        stacked = (torch.stack([results[pair[side]] for pair in made.pairs]) for side in (0, 1))
        queries, documents = (shaped(part, None, self.similarity == "cosine") for part in stacked)
        if self.similarity in ("cosine", "dot"):
            return torch.sum(queries * documents, -1)
        difference = queries - documents
        far = (
            difference.abs().sum(-1) if self.similarity == "manhattan" else difference.square().sum(-1).sqrt()
        )
        return far.neg()


class AnswerScorer:
    """A decoder that is asked whether the document answers the query: the probability of "yes" against "no" (Qwen3-Reranker, arXiv:2506.05176)."""

    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = "Given a web search query, retrieve relevant passages that answer the query"

    def inputs(
        self, front: PoolingFront, pairs: Sequence[tuple[str, str]], instruction: str | None, truncate: bool
    ) -> PairInputs:
        """As of `Scorer`: an input for each pair. What comes before and after is tokenized by itself, and never cut."""
        task, room = self.instruction if instruction is None else instruction, front.shape.max_length
        before, after = (front.tokenizer.encode(text, False) for text in (self.before, self.after))
        texts = [f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
        encoded = [front.tokenizer.encode(text, False) for text in texts]
        if truncate:
            encoded = [ids[: max(0, room - len(before) - len(after))] for ids in encoded]
        return PairInputs.joint([PoolingInput([*before, *ids, *after]) for ids in encoded])

    def scores(self, made: PairInputs, results: Sequence[Tensor], activation: Activation | None) -> Tensor:
        """As of `Scorer`."""
        logits = torch.cat([*results])
        return logits if activation == "none" else logits.sigmoid()


def no_instruction(front: PoolingFront, instruction: str | None) -> None:
    """UsageError if there is one: the model takes none."""
    if instruction is not None:
        raise UsageError(
            f"{front.name} takes no instruction; it is for models that are asked, as Qwen3-Reranker is"
        )


def scores_job(
    front: PoolingFront,
    queries: Any,
    documents: Any,
    activation: Activation | None,
    instruction: str | None,
    truncate: bool,
) -> Job[list[Score]]:
    """The job of `LLM.score`."""
    if front.scorer is None:
        raise UsageError(
            f"{front.name} gives {front.shape.columns} classes for a pair of texts, and a score is one number: call classify"
        )
    if activation not in (None, "sigmoid", "none"):
        raise UsageError(f"activation must be 'sigmoid', 'none' or None, got {activation!r}")
    pairs = _pairs(_texts(queries, "queries"), _texts(documents, "documents"))
    scorer, made = front.scorer, front.scorer.inputs(front, pairs, instruction, truncate)
    for each in made.inputs:
        front.check(each.ids)

    def finish(results: list[Tensor]) -> list[Score]:
        values = scorer.scores(made, results, activation).tolist()
        tokens = [sum(len(made.inputs[i].ids) for i in pair) for pair in made.pairs]
        return [Score(value, used) for value, used in zip(values, tokens, strict=True)]

    return Job(made.inputs, finish)


def ranking_job(
    front: PoolingFront,
    query: Any,
    documents: Any,
    top_n: int | None,
    activation: Activation | None,
    instruction: str | None,
    truncate: bool,
) -> Job[list[Ranked]]:
    """The job of `LLM.rerank`."""
    if not isinstance(query, str):
        raise UsageError(f"rerank takes one query, a text, got {described(query)}")
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise UsageError(f"top_n must be a positive integer or None, got {top_n!r}")
    job = scores_job(front, query, documents, activation, instruction, truncate)

    def finish(results: list[Tensor]) -> list[Ranked]:
        scores = job.finish(results)
        order = sorted(range(len(scores)), key=lambda index: -scores[index].score)
        return [Ranked(index, scores[index].score, scores[index].prompt_tokens) for index in order[:top_n]]

    return Job(job.inputs, finish)


def _texts(texts: Any, what: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else texts
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(text, str) for text in listed):
        raise UsageError(f"{what} must be a text or a list of at least one text, got {described(texts)}")
    return [*listed]


def _pairs(queries: list[str], documents: list[str]) -> list[tuple[str, str]]:
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise UsageError(
            f"{len(queries)} queries and {len(documents)} documents: give one query, or one for each document"
        )
    return [*zip(queries, documents, strict=True)]


def pair_activation(data: Mapping[str, Any], origin: str) -> Activation:
    """What sentence-transformers has written into config.json of a cross-encoder as its activation; the sigmoid where that says nothing."""
    entries = data.get("sentence_transformers")
    named = entries.get("activation_fn") if isinstance(entries, Mapping) else None
    name = (
        str(named or data.get("sbert_ce_default_activation_function") or "Sigmoid")
        .rpartition(".")[2]
        .removesuffix("()")
    )
    known: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none"}
    if name not in known:
        raise ConfigError(
            f"{origin}: the activation of a cross-encoder must be of {', '.join(known)}, got {name!r}"
        )
    return known[name]
