"""A model of lm-evaluation-harness that runs on `gristmill.LLM`: log-likelihoods, rolling log-likelihoods, generation.

All requests of a call are given to the engine at once, which batches them. Tokenization, chat templates and the treatment of stop
strings are those of the harness's Hugging Face model, so that numbers can be compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import AutoTokenizer

from gristmill.integrations.lm_eval.options import device_of, flag, integer, sampling_params
from gristmill.integrations.lm_eval.version import HOST
from gristmill.integrations.options import engine_options
from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class GristmillLM(TemplateLM):  # type: ignore[misc]  # the harness carries no types here
    """``--model gristmill --model_args pretrained=MODEL,...``

    Args:
        pretrained: a Hugging Face directory, or a GGUF file.
        tokenizer: a directory with the tokenizer; None = `pretrained`.
        max_length: longest context of a prediction, tokens; None = the engine's longest request less one token. Longer ones
            are cut on the left, longer texts of rolling log-likelihoods into windows.
        max_gen_toks: output tokens of generation requests that do not say.
        add_bos_token: whether the tokenizer adds its special tokens; None = as it is configured.
        prefix_token_id: the token that the first one of a text is conditioned on; None = begin, else end of text.
        device: the device of the engine. The harness passes ``cuda:0`` where its user said nothing; on a machine without CUDA devices that is
            the CPU, and the log says so.
        batch_size, max_batch_size: passed by the harness and not used: the engine batches.
        options: options of `gristmill.LLM`: dtype, quant, kv_dtype, policy, num_blocks, memory, max_batch_tokens, max_seqs,
            max_model_len, seed ...

    Raises:
        HostError: a version of the harness that is not served.
        UsageError: an unknown option, or an invalid one.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        device: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        HOST.require()
        super().__init__()
        self.llm = LLM(str(pretrained), device=device_of(device), **engine_options(options, ("device",)))
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or pretrained)
        capacity = self.llm.engine.scheduler.config.capacity
        # The token that a context predicts is an output of the engine: a request has one token more than its context.
        longest = capacity - 1 if max_length is None else max_length
        self.max_length = integer("max_length", longest, 1, capacity - 1)
        self.max_gen_toks = integer("max_gen_toks", max_gen_toks, 1)
        self.add_bos_token = flag("add_bos_token", add_bos_token)
        last = self.llm.config.vocab_size - 1
        self._prefix = (
            None if prefix_token_id is None else integer("prefix_token_id", prefix_token_id, 0, last)
        )
        self._device = self.llm.model.plans.device

    @property
    def eot_token_id(self) -> int:
        """The end of a text: the tokenizer's, else the model's first end token.

        Raises:
            UsageError: there is neither.
        """
        ends = [self.tokenizer.eos_token_id, *self.llm.config.eos_ids]
        end = next((token for token in ends if token is not None), None)
        if end is None:
            raise UsageError("the model has no end token: give prefix_token_id")
        return int(end)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text."""
        if self._prefix is not None:
            return self._prefix
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in the harness's caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, by the template of the tokenizer."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **named: Any) -> list[int]:
        """Token ids of a text. Special tokens are not added to a text that begins with one."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            special = False
        ids: list[int] = self.tokenizer.encode(
            string, **({} if special is None else {"add_special_tokens": special})
        )
        return ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, nats; a text longer than `max_length` in disjoint windows with all the context they can have."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            parts = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += parts
            owners += [owner] * len(parts)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(
            owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True
        ):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **named: Any,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether greedy decoding generates it) for each (key, context, continuation).

        The last token of a continuation is the only one that its request may sample, so that a context is not computed for the
        token after it; contexts that several continuations of one token share come from the prefix cache.
        """
        prompts, params = [], []
        for _, context, continuation in requests:
            if not context or not continuation:
                raise ValueError(
                    "a log-likelihood needs a context and a continuation of at least one token each"
                )
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens is longer than max_length, {self.max_length}"
                )
            prompts.append((context + continuation)[-self.max_length - 1 : -1])
            params.append(
                SamplingParams(
                    max_tokens=1,
                    ignore_eos=True,
                    allowed_token_ids=continuation[-1:],
                    logprobs=0,
                    prompt_logprobs=None if len(continuation) == 1 else 0,
                )
            )
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for chunk in self._stream(prompts, params, "log-likelihoods", disable_tqdm):
            key, _, continuation = requests[chunk.index]
            result = results[chunk.index] = _loglikelihood(chunk, len(continuation))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string."""
        prompts, params, stops = [], [], []
        eos = self.tokenizer.decode(self.eot_token_id)
        for request in requests:
            context, given = request.args
            options = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            stop = handle_stop_sequences(options.pop("until", None), eos=eos)
            max_tokens = options.pop("max_gen_toks")
            room = self.max_length + 1 - max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks {max_tokens} leaves no room for a context: requests hold {self.max_length + 1} tokens"
                )
            prompts.append(self.tok_encode(context)[-room:])
            stops.append(stop)
            params.append(sampling_params(options, max_tokens, [text for text in stop if text]))
        ids_of: list[list[int]] = [[] for _ in requests]
        texts = [""] * len(requests)
        for chunk in self._stream(prompts, params, "texts", disable_tqdm):
            ids_of[chunk.index] += chunk.token_ids
            if chunk.finish_reason is not None:
                text = self.tokenizer.decode(ids_of[chunk.index], skip_special_tokens=True)
                texts[chunk.index] = postprocess_generated_text(text, stops[chunk.index], None)
                self.cache_hook.add_partial("generate_until", requests[chunk.index].args, texts[chunk.index])
        return texts

    def _stream(
        self, prompts: list[list[int]], params: list[SamplingParams], what: str, disable_tqdm: bool
    ) -> Iterator[Chunk]:
        """Chunks of all prompts as they come, the longest prompts first."""
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        with tqdm(total=len(prompts), desc=f"gristmill: {what}", disable=disable_tqdm) as progress:
            if not prompts:
                return
            for chunk in self.llm.stream([prompts[i] for i in order], [params[i] for i in order]):
                if chunk.error is not None:
                    logger.error("gristmill: request %d: %s", order[chunk.index], chunk.error)
                progress.update(chunk.finish_reason is not None)
                yield replace(chunk, index=order[chunk.index])


def _loglikelihood(chunk: Chunk, count: int) -> tuple[float, bool]:
    """Log-probabilities of the last `count` tokens of prompt and output; NaN where the logits were NaN."""
    if chunk.error is not None:
        return float("nan"), False
    known = [
        token for token in (*(chunk.prompt_logprobs or ()), *(chunk.logprobs or ())) if token is not None
    ]
    tokens = known[-count:]
    return sum(token.logprob for token in tokens), all(token.rank == 1 for token in tokens)
