"""The exceptions of the runtime, with those of `gristmill.quant.errors`, and `ErrorInfo`: why a request failed, as data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from gristmill.quant.errors import CheckpointError as CheckpointError
from gristmill.quant.errors import ConfigError as ConfigError
from gristmill.quant.errors import UsageError as UsageError

ErrorCode = Literal[
    "invalid_logits",
    "parameters_overflow",
    "no_token_allowed",
    "grammar_failed",
    "out_of_memory",
    "rank_failed",
    "engine_failed",
]


@dataclass(frozen=True)
class ErrorInfo:
    """Why a request failed: the cause of finish_reason ``error``, and of an `EngineDeadError`.

    Attributes:
        code: of a request, ``invalid_logits`` (the model's logits were NaN or infinite), ``parameters_overflow`` (what the request's
            parameters made of them was), ``no_token_allowed`` (they together allow no token) or ``grammar_failed`` (the parser of
            structured_output cannot go on). Of an engine, ``out_of_memory``, ``rank_failed`` (a process of tensor_parallel) or
            ``engine_failed`` (anything else).
        message: what happened.
    """

    code: ErrorCode
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


INVALID_LOGITS = ErrorInfo(
    "invalid_logits",
    "the model's logits for the next token were NaN or infinite: weights that are damaged, activations that overflow (dtype='float32' "
    "shows it), or a kernel that is wrong (`kernelbench verify`)",
)


def error_info(error: BaseException) -> ErrorInfo:
    """What ended an engine, from the exception of its step or the causes of that exception."""
    message = str(error) or type(error).__name__
    if is_out_of_memory(error):
        return ErrorInfo("out_of_memory", message)
    if any(isinstance(one, RankError) for one in _chain(error)):
        return ErrorInfo("rank_failed", message)
    return ErrorInfo("engine_failed", message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or the host ran out, from the exception or its causes: torch's own, or a failed call of the driver (by
    torch, Triton or a library) or of torch's allocator for CPUs, which has only a text."""
    from torch import OutOfMemoryError

    return any(
        isinstance(one, OutOfMemoryError | MemoryError)
        or (isinstance(one, RuntimeError) and any(text in str(one).lower() for text in _OUT_OF_MEMORY))
        for one in _chain(error)
    )


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@contextmanager
def explain_memory(what: str, device: object) -> Iterator[None]:
    """While a model is loaded: memory that runs out is a UsageError, which says what takes less."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError) or not is_out_of_memory(error):
            raise
        cause = str(error).partition(" If reserved but")[0].strip() or type(error).__name__
        raise UsageError(
            f"{what} does not fit in memory (device {str(device)!r}): {cause.removesuffix('.')}. Less is taken by smaller weights "
            "(quant='int4_g128'), a smaller cache (memory, num_blocks), smaller steps (max_batch_tokens, max_seqs), and a lower max_model_len"
        ) from error


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and its causes, as a traceback shows them."""
    chain = [error]
    while True:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or cause in chain:
            return chain
        chain.append(cause)


class RankError(RuntimeError):
    """A process of `tensor_parallel` died, failed or missed its deadline; the message names it. All of them were ended. The engine's
    requests ended with them; the next one starts them again, with an empty cache."""


class ReplicaError(RuntimeError):
    """A process of `Replicas` died, failed or stopped responding; the message names it. Its requests ended, or were run again."""
