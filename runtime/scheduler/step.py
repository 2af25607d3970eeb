"""A step as data: the work of the runner, and the changes to the scheduler on commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gristmill.runtime.errors import ErrorInfo
from gristmill.runtime.kv_cache import CachedBlock, PoolTransaction
from gristmill.runtime.scheduler.request import FinishReason


@dataclass(slots=True)
class ScheduledRequest:
    """Tokens of one request in one step.

    The runner feeds `tokens` at positions start .. start + count - 1 and writes their KV to `slots()`. Attention of the
    token at position p reads positions 0 .. p, or those of its window, through `block_ids`, the
    tables of all groups (`kv_cache.groups`). If `samples`, the logits of the last 1 + drafts
    tokens are computed, otherwise none.
    """

    id: str
    start: int
    count: int
    samples: bool
    tokens: list[int] | None  # None: one, which a step in flight samples: it is read from the request's row
    block_ids: list[int]  # the request's table, complete after the commit; read-only
    new_blocks: Sequence[int]  # allocated by this step, to be appended to block_ids by commit
    drafts: int = 0  # the last `drafts` tokens are proposals that the model has not produced
    row: int = -1  # place of the request's state on the device, set by the commit; -1: none

    def slots(self, block_size: int, group: int = 0, groups: int = 1) -> list[int]:
        """Cache slot (block id * block_size + offset) of every token in a group. Valid after commit."""
        blocks = self.block_ids if groups == 1 else self.block_ids[group::groups]
        return [
            blocks[position // block_size] * block_size + position % block_size
            for position in range(self.start, self.start + self.count)
        ]

    @property
    def draft_tokens(self) -> list[int]:
        """The proposals among its tokens, which the host knows."""
        return [] if self.tokens is None or not self.drafts else self.tokens[-self.drafts :]

    @property
    def context(self) -> int:
        """Positions in the cache after this step."""
        return self.start + self.count


class Decode(ScheduledRequest):
    """The entry of one token without drafts and new blocks, which most entries are: what they have in common is of the class."""

    __slots__ = ()
    count, samples, new_blocks, drafts = 1, True, (), 0

    def __init__(self, id: str, start: int, tokens: list[int] | None, block_ids: list[int], row: int) -> None:
        self.id = id
        self.start = start
        self.tokens = tokens
        self.block_ids = block_ids
        self.row = row

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return Decode, (self.id, self.start, self.tokens, self.block_ids, self.row)


@dataclass(slots=True)
class ScheduledStep:
    """One step. Made by `Scheduler.schedule`, which changes nothing; applied by `Scheduler.commit`."""

    version: int  # version of the scheduler that the step belongs to
    entries: list[ScheduledRequest] = field(default_factory=list)
    num_tokens: int = 0
    admitted: dict[str, list[CachedBlock]] = field(default_factory=dict)  # id -> hits in the prefix cache
    preempted: list[str] = field(default_factory=list)
    bypassed: dict[str, int] = field(
        default_factory=dict
    )  # id -> number of younger requests that this step admits before it
    pool: PoolTransaction | None = None
    has_drafts: bool = False  # the tokens that remain of the drafts are known with the results only

    @property
    def evicted_blocks(self) -> list[int]:
        """Blocks whose cached content this step evicts."""
        return [] if self.pool is None else list(self.pool.evicted)

    def sampling(self) -> list[ScheduledRequest]:
        """Entries that sample, in order: `Scheduler.update` takes one result per entry."""
        return [entry for entry in self.entries if entry.samples]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The probability of a token under the model, before logits are processed.

    Attributes:
        token_id: the token.
        logprob: its log-probability, nats.
        rank: its rank among all tokens by probability, from 1.
        top: (token id, log-probability) of the most likely tokens, in order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RequestOutput:
    """The output of a step, or of an abort, for one request.

    Attributes:
        id: the request's.
        new_ids: token ids of this step, in order; a final end token is among them.
        finish_reason: why the request ended with this output; None = it continues.
        logprobs: those of new_ids; empty where `SamplingParams.logprobs` is None.
        prompt_logprobs: those of the prompt's tokens, None for the first: with the first new id, if requested.
        error: why finish_reason is ERROR; else None.
        cached_tokens: tokens of the prompt that were found in the prefix cache. Outputs that differ in it alone are equal.
    """

    id: str
    new_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = field(default=0, compare=False)
