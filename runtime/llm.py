"""LLM: a model directory in, text out.

llm = LLM("examples/models/docs-llama", quant="int4_g128")
for result in llm.generate(["The index"], SamplingParams(max_tokens=32)):
    print(result.text)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gristmill.quant.checkpoints.checkpoint import Checkpoint, NoTokenizerError
from gristmill.runtime.chat.answer import ChatAnswer, ChatChunk, GrowingAnswer
from gristmill.runtime.chat.chat import Chat, prepare_chat
from gristmill.runtime.chat.conversation import ChatOptions, Message
from gristmill.runtime.completion import (
    Chunk,
    Completion,
    GrowingCompletion,
    TextOutput,
    engine_params,
    text_stream,
)
from gristmill.runtime.engine import Engine, PauseMode
from gristmill.runtime.engine_config import EngineConfig, takes_options
from gristmill.runtime.errors import UsageError
from gristmill.runtime.explain import explain_plans
from gristmill.runtime.grammars import Grammar, GrammarCompiler
from gristmill.runtime.integers import as_integer, as_prompt, described, integers, is_integers
from gristmill.runtime.loader.config import open_checkpoint
from gristmill.runtime.models import Encoder, Model
from gristmill.runtime.ownership import STREAMED
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.parallel.rank_processes import RemoteModel
from gristmill.runtime.pooling.classes import ClassActivation, Classification
from gristmill.runtime.pooling.engine import PoolingQueue
from gristmill.runtime.pooling.front import Embedding, PoolingFront
from gristmill.runtime.pooling.open import open_pooling
from gristmill.runtime.pooling.pairs import Activation
from gristmill.runtime.pooling.scoring import Ranked, Score, ranking_job, scores_job
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Tensor | NDArray[np.integer[Any]]
"""Text, or token ids: a list, or an array or tensor of one dimension."""
NO_TEXT = "is for embeddings or scores, and generates no text: call embed, score, rerank or classify"
NO_POOLING = "generates text: it has no modules.json that says how to pool; LLM(..., task='embed') pools the last token"


class LLM:
    """A model with its engine and tokenizer: from text or token ids to completions.

    engine, model and config are attributes. A model for embeddings or scores, an encoder or a sentence-transformers directory, has no engine: `embed`
    runs it, and `generate` raises a UsageError.

    Args:
        model: a Hugging Face directory, a GGUF file, or either as `open_checkpoint` returned it; or the name of a repository of the
            Hugging Face hub, which is fetched: ``org/name``, ``org/name:file.gguf``, ``org/name@revision``.
        options: those of `EngineConfig`, by name.

    Raises:
        UsageError: an invalid argument; a model that does not fit in memory; for an invalid directory, its kinds ConfigError or CheckpointError.
        PolicyError: a policy that is unreadable, or that this machine cannot satisfy.
        NoKernelError: no kernel can run an operation of the model here under the policy.
    """

    @takes_options(EngineConfig)
    def __init__(self, model: str | Path | Checkpoint, **options: Any) -> None:
        self._open(model, EngineConfig.of(options))

    @classmethod
    def from_config(cls, model: str | Path | Checkpoint, config: EngineConfig) -> LLM:
        """As the constructor, with the options as one object."""
        llm = cls.__new__(cls)
        llm._open(model, config)
        return llm

    def _open(self, model: str | Path | Checkpoint, config: EngineConfig) -> None:
        checkpoint = open_checkpoint(model)
        self.path = checkpoint.path
        self._compiler: GrammarCompiler | None = None
        self._conversations: Chat | None = None
        self._requests = 0
        self._engine: Engine | None = None
        self._pooling = open_pooling(checkpoint, config)
        self._tokenizer: Tokenizer | NoTokenizerError
        self.model: Model | RemoteModel | Encoder
        if self._pooling is not None:
            self._tokenizer = self._pooling.given_tokenizer
            self.model = self._pooling.engine.model
            self.config = self.model.config
            return
        try:  # before any weight is read, so that an error in it is known at once
            self._tokenizer = Tokenizer(checkpoint)
        except NoTokenizerError as error:
            self._tokenizer = error
        self._engine = Engine.from_config(checkpoint, config)
        self.model = self._engine.runner.model
        self.config = self.model.config

    @property
    def engine(self) -> Engine:
        """The engine that generates; UsageError if the model does not."""
        if self._engine is None:
            raise UsageError(f"{self.path} {NO_TEXT}")
        return self._engine

    @property
    def pools(self) -> bool:
        """Whether the model makes embeddings or scores, and generates nothing."""
        return self._pooling is not None

    @property
    def pooling(self) -> PoolingFront:
        """What makes embeddings and scores; UsageError if the model is not for them."""
        if self._pooling is None:
            raise UsageError(f"{self.path} {NO_POOLING}")
        return self._pooling

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the directory or the GGUF file; NoTokenizerError if it has none that can be read."""
        if isinstance(self._tokenizer, NoTokenizerError):
            raise self._tokenizer
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Complete every prompt, batched by the scheduler; results are in the order of the prompts, each with its n choices in turn.

        Args:
            prompts: one or several; text, or token ids (a list, or an array or tensor of one dimension) that are used unchanged. Without a
                tokenizer.json prompts must be ids, and `text` is empty.
            params: one for all, or one for each; None = greedy, 128 tokens, whatever the model's generation_config.json recommends (its end
                tokens are used).
            priority: one for all, or one for each; lower values first, in an LLM made with queue_order="priority".

        Raises:
            UsageError: an empty prompt, ids outside the vocabulary, params of the wrong number or type; the engine is paused, an
                AsyncEngine serves it, or another generate or stream has not ended.
            RequestTooLarge: a prompt that can never fit in the cache or the model's length.
            QueueFull: more prompts than max_queued or max_queued_tokens allow to wait.
            EngineDraining: `drain` was called.
        """
        ids = self._prompts(prompts)
        growing = defaultdict[tuple[int, int], GrowingCompletion](GrowingCompletion)
        params_by_prompt = self._params(params, len(ids))
        for chunk in self._run(ids, params_by_prompt, _priorities(priority, len(ids)), whole=True):
            growing[chunk.index, chunk.choice].add(chunk)
        return [
            growing[index, choice].completion(prompt)
            for index, (prompt, request_params) in enumerate(zip(ids, params_by_prompt, strict=True))
            for choice in range(request_params.n)
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[Chunk]:
        """Like `generate`, but streamed in chunks. Text is never split inside a character; closing the iterator aborts."""
        ids = self._prompts(prompts)
        return self._run(ids, self._params(params, len(ids)), _priorities(priority, len(ids)))

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> ChatAnswer:
        """The model's answer in a conversation, by its chat template.

        Args:
            messages: `Message`, or mappings as OpenAI's API has them.
            params: None = greedy, 128 tokens.
            options: tools and thoughts; None = as the template has it.

        Raises:
            UsageError: no template, a conversation that it refuses; as `generate`.
        """
        growing, chunks = self._chat(messages, params, options)
        for chunk in chunks:
            growing.add(chunk)
        return growing.answer()

    def stream_chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> Iterator[ChatChunk]:
        """Like `chat`, but streamed; closing the iterator aborts."""
        growing, chunks = self._chat(messages, params, options)
        return (growing.add(chunk) for chunk in chunks)

    @property
    def conversations(self) -> Chat:
        """The template and the format of messages of the model."""
        if self._conversations is None:
            self._conversations = Chat(self.path, self.tokenizer)
        return self._conversations

    def _chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        params: SamplingParams | None,
        options: ChatOptions | None,
    ) -> tuple[GrowingAnswer, Iterator[Chunk]]:
        ids, params, growing = prepare_chat(self.conversations, messages, params, options)
        return growing, self.stream([ids], params)

    def pause(self, mode: PauseMode = "wait") -> None:
        """As `Engine.pause`, between the chunks of a stream or in a signal handler."""
        self._steps().pause(mode)

    def resume(self) -> None:
        """As `Engine.resume`."""
        self._steps().resume()

    def drain(self, timeout: float | None = None) -> None:
        """As `Engine.drain`: after `timeout` seconds a running `generate` returns the completions so far, with finish_reason ``abort``."""
        self._steps().drain(timeout)

    def _steps(self) -> Engine | PoolingQueue:
        return self.engine if self._pooling is None else self._pooling.engine

    def close(self) -> None:
        """As `Engine.close`."""
        if self._engine is not None:
            self._engine.close()
        if self._pooling is not None:
            self._pooling.engine.close()

    def compile_grammars(self, params: SamplingParams) -> list[Grammar | None]:
        """A grammar for each of the n completions; None where anything may come out. UsageError says what is wrong with it."""
        if params.structured_output is None:
            return [None] * params.n
        if self._compiler is None:
            self._compiler = GrammarCompiler(
                self.tokenizer.to_json(), self.config.vocab_size, sorted(self.config.eos_ids)
            )
        return [*self._compiler.compile(params.structured_output).copies(params.n)]

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> list[Embedding]:
        """The embedding of every text, in their order.

        Args:
            texts: one or several; text, or token ids that are used unchanged, without a prompt.
            dimensions: cut vectors to so many elements, before they are normalized (Kusupati et al., 2022, arXiv:2205.13147); None = all.
            normalize: whether vectors have length 1; None = as the model's modules.json says.
            prompt: a text to put before each; prompt_name: the name of one of the model's; None = the model's default, if it has one.
            truncate: cut texts that are longer than the model takes; False = they are refused.

        Raises:
            UsageError: the model generates text, or scores pairs; an empty text, ids outside the vocabulary, dimensions that it does not have.
            RequestTooLarge: a text that is longer than the model takes.
            QueueFull: more texts than max_queued or max_queued_tokens allow to wait.
        """
        front = self.pooling
        job = front.embeddings(
            texts,
            dimensions=dimensions,
            normalize=normalize,
            prompt=prompt,
            prompt_name=prompt_name,
            truncate=truncate,
        )
        return job.finish(front.engine.run(job.inputs))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activation: Activation | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[Score]:
        """How well each document answers its query: by a cross-encoder, which reads both, by a decoder's "yes", or by the similarity of their
        embeddings.

        Args:
            queries: one for all documents, or one for each.
            activation: of a cross-encoder's logit, ``sigmoid`` or ``none``; None = as the model's config.json says.
            instruction: what makes a document an answer, for models that are asked (Qwen3-Reranker); None = its own, of web search.
            truncate: cut pairs that are longer than the model takes, the longer text first; False = they are refused.

        Raises:
            UsageError: the model generates text, or has several classes; no texts, or not as many queries as documents.
            RequestTooLarge, QueueFull: as `embed`.
        """
        front = self.pooling
        job = scores_job(front, queries, documents, activation, instruction, truncate)
        return job.finish(front.engine.run(job.inputs))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        activation: Activation | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[Ranked]:
        """The documents by their `score` for a query, best first; the first `top_n`, None = all. Of equal scores the first document comes first."""
        front = self.pooling
        job = ranking_job(front, query, documents, top_n, activation, instruction, truncate)
        return job.finish(front.engine.run(job.inputs))

    def classify(
        self,
        texts: Prompt | tuple[str, str] | Sequence[Prompt | tuple[str, str]],
        *,
        activation: ClassActivation | None = None,
        truncate: bool = False,
    ) -> list[Classification]:
        """The classes of every text, by a classifier that has several, in their order.

        Args:
            texts: one or several; text, a tuple of two texts among several (of models that compare them), or token ids.
            activation: of the logits: ``softmax``, one class among all; ``sigmoid``, each by itself; ``none``. None = as ``problem_type`` in the
                model's config.json says, ``softmax`` if it says nothing.
            truncate: as of `embed`; of a pair, the longer text is cut first.

        Raises:
            UsageError: the model generates text, makes embeddings, or has one label, which is a score; texts as of `embed`.
            RequestTooLarge, QueueFull: as `embed`.
        """
        front = self.pooling
        job = front.classifications(texts, activation=activation, truncate=truncate)
        return job.finish(front.engine.run(job.inputs))

    @property
    def weight_bytes(self) -> int:
        """Resident bytes of all parameters, as packed."""
        return self.model.plans.weight_bytes

    def explain(self) -> list[dict[str, Any]]:
        """The kernel that each operation of this model has used so far, by size, and why; rows as `explain --json` prints them."""
        if self._pooling is not None:
            return self._pooling.engine.explain()
        runner = self.engine.runner
        return (
            runner.explain()[0] if isinstance(runner, ParallelRunner) else explain_plans(runner.model.plans)
        )

    def explain_graphs(self) -> list[dict[str, Any]]:
        """The steps that have run as CUDA graphs so far, and why the others have not; rows as in `DecodeGraphs.explain`. Those of steps that
        run in pieces (`PromptGraphs`) have None for sequences, tokens and context."""
        runner = self.engine.runner
        if isinstance(runner, ParallelRunner):
            return runner.explain()[1]
        return runner.explain_graphs()

    def _run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        priorities: list[int],
        *,
        whole: bool = False,
    ) -> Iterator[Chunk]:
        """The chunks of all prompts as they come. whole: as of `TextOutput`."""
        engine = self.engine
        engine.ownership.take(STREAMED, any_thread=True)
        outputs: dict[str, TextOutput] = {}

        def tokenizer() -> Tokenizer:
            return self.tokenizer

        try:
            for index, (prompt, request_params, priority) in enumerate(
                zip(prompts, params, priorities, strict=True)
            ):
                first = None
                for choice, grammar in enumerate(self.compile_grammars(request_params)):
                    name = f"llm-{self._requests}"
                    self._requests += 1
                    decoder = text_stream(tokenizer, request_params, prompt)
                    text = TextOutput(index, choice, request_params, decoder, whole=whole)
                    choice_params = engine_params(request_params, choice, tokenizer)
                    engine.add_request(name, prompt, choice_params, priority, first, grammar)
                    outputs[name] = text
                    first = first or name
            while outputs:
                if engine.paused:
                    raise UsageError(
                        engine.residency.reason or "the engine is paused: call resume, then generate"
                    )
                for output in engine.step():
                    if (text_output := outputs.get(output.id)) is None or text_output.keep(output):
                        continue
                    chunk = text_output.push(output)
                    if chunk.finish_reason is not None:
                        del outputs[output.id]
                        engine.abort([output.id])  # the engine does not know about stop strings
                    yield chunk
        finally:
            engine.abort(outputs)
            engine.ownership.give_back()

    def _prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        several = not isinstance(prompts, str) and not is_integers(prompts)
        if several and (not isinstance(prompts, Sequence) or isinstance(prompts, bytes)):
            raise UsageError(
                "prompts are text, token ids (a list, or an array of one dimension), or a list of such, "
                f"got {described(prompts)}"
            )
        prompt_ids: list[list[int]] = []
        for prompt in prompts if several else [prompts]:
            given = as_prompt(prompt)
            prompt_ids.append(self.tokenizer.encode(given) if isinstance(given, str) else given)
            if not prompt_ids[-1]:
                raise UsageError("the prompt is empty: at least one token is needed")
        if not prompt_ids:
            raise UsageError("no prompts were given")
        return prompt_ids

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise UsageError(
                f"params must be a SamplingParams, or a list of one for each prompt, got {params!r}"
            )
        if len(params) != count:
            raise UsageError(
                f"{count} prompts and {len(params)} SamplingParams: give one for all, or one for each"
            )
        return list(params)


def _priorities(priority: int | Sequence[int], count: int) -> list[int]:
    if (one := as_integer(priority)) is not None:
        return [one] * count
    each = integers(priority, "priority", "integers") if is_integers(priority) else []
    if len(each) != count:
        raise UsageError(f"priority must be an integer, or one for each of {count} prompts, got {priority!r}")
    return each
