"""LLM: a model directory in, text out.

llm = LLM("examples/models/docs-llama", quant="int4_g128")
for result in llm.generate(["The index"], SamplingParams(max_tokens=32)):
    print(result.text)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.runtime.engine import Engine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.explain import explain_plans
from gristmill.runtime.loader.checkpoint import NoTokenizerError
from gristmill.runtime.models import Model
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import TextStream, Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """The completion of one prompt.

    Attributes:
        prompt_ids, token_ids: token ids of the prompt and of the completion, including a final end token.
        text: the completion as text; empty for a model without a tokenizer.
        finish_reason: ``stop`` (an end token), ``length``, ``abort``, or ``error`` (the model's logits were NaN).
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Chunk:
    """The part of a completion that one step added.

    Attributes:
        index: the index of the prompt, from 0.
        token_ids: new token ids.
        text: new text, of whole characters; a step may have none.
        finish_reason: as of `Completion`; None until the last chunk of the prompt.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None


class LLM:
    """A model with its engine and tokenizer: from text or token ids to completions.

    The arguments are those of `Engine`. engine, model and config are attributes.

    Raises:
        UsageError: an invalid argument; for an invalid directory, its kinds ConfigError or CheckpointError.
        PolicyError: a policy that is unreadable, or that this machine cannot satisfy.
        NoKernelError: no kernel can run an operation of the model here under the policy.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        quant: str | QuantScheme | torch.dtype | None = None,
        device: str | torch.device = "cpu",
        policy: Policy | str | Path | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory: int | float | None = None,
        max_batch_tokens: int = 2048,
        max_seqs: int = 64,
        max_model_len: int | None = None,
        max_chunk: int | None = None,
        enable_prefix_cache: bool = True,
        seed: int = 0,
        decode_graphs: bool | None = None,
    ) -> None:
        self.engine = Engine(
            model,
            dtype=dtype,
            quant=quant,
            device=device,
            policy=policy,
            block_size=block_size,
            num_blocks=num_blocks,
            memory=memory,
            max_batch_tokens=max_batch_tokens,
            max_seqs=max_seqs,
            max_model_len=max_model_len,
            max_chunk=max_chunk,
            enable_prefix_cache=enable_prefix_cache,
            seed=seed,
            decode_graphs=decode_graphs,
        )
        self.path = Path(model)
        self.model: Model = self.engine.runner.model
        self.config = self.model.config
        self._tokenizer: Tokenizer | None = None
        self._requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the directory or the GGUF file; ConfigError if it has none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.path)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, batched by the scheduler; results are in the order of the prompts.

        prompts: one or several; text, or token ids that are used unchanged. params: one for all, or one for each; None =
        greedy, 128 tokens, whatever the model's generation_config.json recommends (its end tokens are used).
        Without a tokenizer.json prompts must be ids, and `text` is empty.

        Raises:
            UsageError: an empty prompt, ids outside the vocabulary, params of the wrong number or type.
            RequestTooLarge: a prompt that can never fit in the cache or the model's length.
        """
        ids = self._prompts(prompts)
        tokens: list[list[int]] = [[] for _ in ids]
        texts = [""] * len(ids)
        reasons = ["abort"] * len(ids)
        for chunk in self._run(ids, self._params(params, len(ids))):
            tokens[chunk.index] += chunk.token_ids
            texts[chunk.index] += chunk.text
            reasons[chunk.index] = chunk.finish_reason or reasons[chunk.index]
        return [
            Completion(tuple(prompt), tuple(new), text, reason)
            for prompt, new, text, reason in zip(ids, tokens, texts, reasons, strict=True)
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Chunk]:
        """Like `generate`, but streamed in chunks. Text is never split inside a character; closing the iterator aborts."""
        ids = self._prompts(prompts)
        return self._run(ids, self._params(params, len(ids)))

    @property
    def weight_bytes(self) -> int:
        """Resident bytes of all parameters, as packed."""
        return self.model.plans.weight_bytes

    def explain(self) -> list[dict[str, Any]]:
        """The kernel that each operation of this model has used so far, by size, and why; rows as `explain --json` prints them."""
        return explain_plans(self.model.plans)

    def explain_graphs(self) -> list[dict[str, Any]]:
        """The steps that have run as CUDA graphs so far, and why the others have not; rows as in `DecodeGraphs.explain`."""
        decode = self.engine.runner.decode
        return [] if decode is None else decode.explain()

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[Chunk]:
        engine = self.engine
        indices: dict[str, int] = {}
        try:
            for index, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
                name = f"llm-{self._requests}"
                self._requests += 1
                engine.add_request(name, prompt, self._engine_params(wish))
                indices[name] = index
            streams = [self._stream() for _ in prompts]
            open_requests = set(indices)
            while open_requests:
                for output in engine.step():
                    if output.id not in indices:
                        continue
                    index = indices[output.id]
                    text = "" if (decoder := streams[index]) is None else decoder.push(output.new_ids)
                    reason = None
                    if output.finish_reason is not None:
                        open_requests.discard(output.id)
                        reason = output.finish_reason.value
                        text += "" if decoder is None else decoder.finish()
                    yield Chunk(index, tuple(output.new_ids), text, reason)
        finally:
            engine.abort(indices)

    def _engine_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with texts as token ids, as the engine takes them."""
        if not any(isinstance(word, str) for word in params.bad_words):
            return params
        words = [
            ids
            for word in params.bad_words
            for ids in (self.tokenizer.words(word) if isinstance(word, str) else [word])
        ]
        return replace(params, bad_words=words)

    def _stream(self) -> TextStream | None:
        try:
            return self.tokenizer.stream()
        except NoTokenizerError:
            return None

    def _prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        if not isinstance(prompts, str | Sequence) or isinstance(prompts, bytes):
            raise UsageError(
                f"prompts are text, a list of token ids, or a list of such, got {type(prompts).__name__}"
            )
        alone = isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(p, int) for p in prompts))
        prompt_ids: list[list[int]] = []
        for prompt in [prompts] if alone else prompts:
            if isinstance(prompt, str):
                prompt_ids.append(self.tokenizer.encode(prompt))
            elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
                prompt_ids.append(list(prompt))  # type: ignore[arg-type]
            else:
                raise UsageError(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")
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
        if not isinstance(params, Sequence) or not all(isinstance(wish, SamplingParams) for wish in params):
            raise UsageError(
                f"params must be a SamplingParams, or a list of one for each prompt, got {params!r}"
            )
        if len(params) != count:
            raise UsageError(
                f"{count} prompts and {len(params)} SamplingParams: give one for all, or one for each"
            )
        return list(params)
