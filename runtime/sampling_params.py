"""Sampling and stopping parameters of a request, validated on construction; checks of an engine's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from gristmill.runtime.declared_names import require_fields
from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.integers import as_flag, as_integer, integers
from gristmill.runtime.structured_output import StructuredOutput

MAX_SEED = 2**63 - 1
MAX_N = 16_384


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. The defaults are the same for every model: generation_config.json does not change them.

    Integers, numbers and booleans may be those of numpy, token ids also arrays and tensors of one dimension; they are kept as Python's.

    Logits pass, in this order: logit_bias and allowed_token_ids, bans (min_tokens, bad_words), structured_output,
    repetition_penalty, frequency_penalty, presence_penalty, temperature, top_k, top_p, min_p.

    Args:
        max_tokens: maximum number of output tokens.
        temperature: 0 = greedy: the token with the largest logit, ties to the smallest id.
        top_k: only the k most likely tokens; 0 = all.
        top_p: only the most likely tokens whose probabilities sum to this; 1 = all.
        min_p: only tokens whose probability is at least this fraction of the largest; 0 = all.
        seed: with the same seed a request samples the same tokens whatever else runs; None = chosen by the engine.
        stop_token_ids: ids that end the request, in addition to the model's end tokens; they are part of the output.
        ignore_eos: continue after the model's end tokens.
        presence_penalty: subtracted from the logit of every token that is in the output; -2 to 2.
        frequency_penalty: subtracted from a token's logit once for every time that it is in the output; -2 to 2.
        repetition_penalty: logits of tokens in the prompt or the output are divided by it if positive, multiplied if
            negative (Keskar et al., 2019, arXiv:1909.05858); 1 = off.
        logit_bias: token id -> number added to its logit.
        bad_words: texts, or lists of token ids, that are not generated: the last token is barred where the others precede it.
            A text stands for its tokens at the beginning of a word and inside one. Texts need a tokenizer: `LLM`, not `Engine`.
        allowed_token_ids: the only ids that may be sampled; None = all.
        min_tokens: number of output tokens before which no end token is sampled and no stop string ends the request.
        stop: texts that end the request where the first of them is complete; the output's text ends before it. Needs a tokenizer:
            `LLM` or `AsyncEngine`, not `Engine`.
        include_stop_str_in_output: the output's text ends after the stop string.
        skip_special_tokens: leave special tokens out of the output's text; False shows them, as parsers of tool calls need.
        logprobs: log-probabilities of the output tokens, and of this many most likely tokens at each position, from the model's
            logits before they are processed; None = none.
        prompt_logprobs: the same for the prompt, whose part in the prefix cache is then computed again; None = none.
        structured_output: what the output looks like, from its first token to its end token; None = anything. Needs `LLM` or
            `AsyncEngine`, and llguidance.
        n: number of completions of the prompt, which is computed once (with a prefix cache); with a seed, choice i has
            seed + i. Needs `LLM` or `AsyncEngine`.

    Raises:
        UsageError: a value outside its range; the message names it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._integer("max_tokens", 1)
        self._integer("top_k", 0)
        self._integer("min_tokens", 0)
        self._integer("n", 1)
        if self.n > MAX_N:
            raise UsageError(f"n must be at most {MAX_N}, got {self.n}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0)
        if self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        self._number("temperature", 0.0, math.inf, "a finite number of at least 0")
        self._number("top_p", 0.0, 1.0, "a number in (0, 1]", open_below=True)
        self._number("min_p", 0.0, 1.0, "a number in [0, 1]")
        self._number("presence_penalty", -2.0, 2.0, "a number in [-2, 2]")
        self._number("frequency_penalty", -2.0, 2.0, "a number in [-2, 2]")
        self._number("repetition_penalty", 0.0, math.inf, "a finite number above 0", open_below=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._flag(name)
        if self.seed is not None:
            self._integer("seed", 0)
            if self.seed > MAX_SEED:
                raise UsageError(f"seed must be at most {MAX_SEED}, got {self.seed}")
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("bad_words", _bad_words(self.bad_words))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise UsageError("allowed_token_ids must name at least one token id; None allows all")

        if self.structured_output is not None:
            if not isinstance(self.structured_output, StructuredOutput):
                raise UsageError(
                    f"structured_output must be a StructuredOutput, got {self.structured_output!r}"
                )
            if self.ignore_eos or self.min_tokens:
                raise UsageError(
                    "a structured output ends where it is complete: ignore_eos and min_tokens cannot be set"
                )

    @classmethod
    def of(cls, values: Mapping[str, Any], what: str = "SamplingParams") -> SamplingParams:
        """Parameters by name, as JSON has them: the token ids of logit_bias may be texts, and structured_output a mapping with one of its fields.

        Args:
            what: where the names come from, for the message.

        Raises:
            UsageError: a name that is no parameter's, or an invalid value.
        """
        given = dict(require_fields(cls, values, what))
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = token_biases(bias)
        if isinstance(structure := given.get("structured_output"), Mapping):
            given["structured_output"] = StructuredOutput.of(structure)
        return cls(**given)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before they are sampled, by anything but temperature and filters."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.min_tokens
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _integer(self, name: str, least: int) -> None:
        value = as_integer(getattr(self, name))
        if value is None or value < least:
            raise UsageError(f"{name} must be an integer of at least {least}, got {getattr(self, name)!r}")
        self._set(name, value)

    def _flag(self, name: str) -> None:
        value = as_flag(getattr(self, name))
        if value is None:
            raise UsageError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._set(name, value)

    def _number(self, name: str, low: float, high: float, expected: str, open_below: bool = False) -> None:
        value = getattr(self, name)
        if not _finite(value) or not low <= value <= high or (open_below and value == low):
            raise UsageError(f"{name} must be {expected}, got {value!r}")
        self._set(name, _plain(value))


RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that a model's generation_config.json may recommend."""


def recommended_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that the contents of a generation_config.json recommend; {} if none. ConfigError: one of them is no value of a parameter, which
    every request without its own would be refused for."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    values = {name: generation[name] for name in RECOMMENDED if generation.get(name) is not None}
    if values.get("top_k") == -1:  # vLLM's way of saying all
        values["top_k"] = 0
    try:
        SamplingParams(**values)
    except UsageError as error:
        raise ConfigError(
            f"the model's generation_config.json recommends what cannot be: {error}; correct the file, or serve with --generation-config none"
        ) from error
    return values


def token_biases(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """A bias for each token id, from JSON, whose keys are texts."""
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: v for key, v in values.items()}


def _finite(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def _plain(value: float) -> float:
    """A number of numpy as a float; those of Python stay as they are."""
    return value if type(value) in (int, float) else float(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    ids = tuple(integers(value, name))
    if ids and min(ids) < 0:
        raise UsageError(f"{name} must be token ids (non-negative integers), got {min(ids)}")
    return ids


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or isinstance(strings, bytes):
        raise UsageError(f"stop must be a text or a list of texts, got {value!r}")
    if not all(isinstance(string, str) and string for string in strings):
        raise UsageError(f"stop must be texts of at least one character, got {value!r}")
    return tuple(strings)


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, got {value!r}")
    biases: dict[int, float] = {}
    for given, bias in value.items():
        token = as_integer(given)
        if token is None or token < 0 or not _finite(bias):
            raise UsageError(f"logit_bias must map token ids to finite numbers, got {given!r}: {bias!r}")
        biases[token] = _plain(bias)
    return biases


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UsageError(f"bad_words must be a list of texts or of lists of token ids, got {value!r}")
    words = tuple(word if isinstance(word, str) else _token_ids("bad_words", word) for word in value)
    if any(not word for word in words):
        raise UsageError("bad_words must not hold an empty text or an empty list")
    return words


def check_integers(**values: object) -> None:
    """UsageError unless each is a positive integer or None."""
    for name, value in values.items():
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"{name} must be an integer of at least 1, got {value!r}")


def is_seconds(value: object) -> bool:
    """Whether a value is a number of at least 0, which may be infinite."""
    return (_finite(value) or value == math.inf) and isinstance(value, Real) and bool(float(value) >= 0)


def check_timeout(timeout: float | None) -> None:
    """UsageError unless it is a number of seconds, or None."""
    if timeout is not None and not is_seconds(timeout):
        raise UsageError(f"timeout must be seconds, at least 0, or None, got {timeout!r}")


def check_params(request_id: str, params: SamplingParams, stop_ids: Iterable[int], vocab_size: int) -> None:
    """UsageError if the parameters need text, or name ids outside the vocabulary."""
    if params.n != 1 or params.stop or params.structured_output is not None:
        raise UsageError(
            f"request {request_id!r}: the engine makes one completion of token ids; n and stop strings need LLM or AsyncEngine, "
            "and so does structured_output"
        )
    for which in ("logprobs", "prompt_logprobs"):
        if (getattr(params, which) or 0) > vocab_size:
            raise UsageError(
                f"request {request_id!r}: {which} must be at most the vocabulary's size {vocab_size}, "
                f"got {getattr(params, which)}"
            )
    if not params.edits_logits:
        return
    banned: list[int] = []
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": stop_ids if params.min_tokens else (),
        "bad_words": banned,
    }
    for word in params.bad_words:
        if isinstance(word, str):
            raise UsageError(
                f"request {request_id!r}: the engine has no tokenizer: bad_words must be lists of token ids, got {word!r}"
            )
        banned.extend(word)
    for name, ids in named.items():
        wrong = next((token for token in ids if token >= vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"request {request_id!r}: {name} must be token ids from 0 to {vocab_size - 1}, got {wrong}"
            )
