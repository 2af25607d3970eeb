"""A request in the scheduler: ids and counts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import Enum

from gristmill.runtime.kv_cache import CachedBlock


class RequestState(Enum):
    """Where a request is."""

    NEW = "new"  # not added yet
    WAITING = "waiting"  # has no blocks; includes preempted requests
    HELD = "held"  # waits for an external event
    RUNNING = "running"  # has blocks and counts towards max_seqs
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended.

    STOP: an end token was sampled.
    LENGTH: max_tokens, max_model_len or the capacity of the cache was reached.
    ABORT: the caller ended it.
    ERROR: no token could be sampled; `RequestOutput.error` says why.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """A prompt and its progress.

    It has no reference to the scheduler, callbacks or other requests, so that it is freed with its last owner.

    tokens      tokens that the host knows: the prompt, then the output. Append-only.
    pending     tokens sampled by steps in flight, which follow `tokens` and are on the device only
    computed    the number of tokens, pending ones included, whose KV is in the cache when the steps in flight have ended
    row         place of the request's state on the device while it runs, below max_seqs; -1: it does not run
    block_ids   block tables of the groups, interleaved (`kv_cache.groups`); replaced, never emptied in place, when the blocks are released
    drafts      proposed continuation of `tokens`, to be verified in the next step
    limit       tokens at which the request ends by length
    bypassed    younger requests admitted before this one while it waits for blocks
    steady      while `computed` is below it, a step computes one token of the request, and needs no block; set with every other change
    started     whether it has been admitted before; such requests run to their end while the queue is paused
    refusal     what the last try to admit it has found: blocks in the prefix cache, blocks that are needed besides those that others hold, and
                `BlockPool.shares` at that time. A memo of the scheduler
    reads_cache whether it may use blocks of the prefix cache; False if every position of the prompt must be computed
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "block_hashes",
        "block_ids",
        "bypassed",
        "cache_key",
        "cached_tokens",
        "computed",
        "drafts",
        "finish_reason",
        "id",
        "last_cached",
        "limit",
        "max_tokens",
        "pending",
        "preemptions",
        "priority",
        "prompt_len",
        "reads_cache",
        "refusal",
        "registered",
        "row",
        "started",
        "state",
        "steady",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        stop_ids: Iterable[int] = (),
        priority: int = 0,
        cache_key: Hashable = None,
    ) -> None:
        """`cache_key` separates prefix caches: requests share blocks only where it is equal (adapter, image, tenant).

        Raises TypeError or ValueError for an empty prompt, ids that are not non-negative ints, or max_tokens < 1.
        """
        tokens = list(prompt_ids)
        if not tokens:
            raise ValueError(f"request {id!r}: the prompt is empty, at least one token id is needed")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool):
                raise TypeError(
                    f"request {id!r}: prompt ids must be ints, got {token!r} ({type(token).__name__})"
                )
            if token < 0:
                raise ValueError(f"request {id!r}: prompt ids must not be negative, got {token}")
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
            raise TypeError(f"request {id!r}: max_tokens must be an int, got {max_tokens!r}")
        if max_tokens < 1:
            raise ValueError(f"request {id!r}: max_tokens must be at least 1, got {max_tokens}")
        hash(cache_key)  # an unhashable key fails here, not during a step
        self.id = id
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(stop_ids)
        self.priority = priority
        self.cache_key = cache_key
        self.arrival = -1  # set by the scheduler, whose only clock it is
        self.state = RequestState.NEW
        self.finish_reason: FinishReason | None = None
        self.limit = self.prompt_len + max_tokens  # lowered by the scheduler to its capacity
        self.computed = 0
        self.pending = 0
        self.row = -1
        self.block_ids: list[int] = []
        self.drafts: list[int] = []
        self.bypassed = 0
        self.reads_cache = True
        self.refusal: tuple[int, int, int] | None = None
        self.started = False
        self.steady = 0
        self.preemptions = 0
        self.cached_tokens = 0  # prompt tokens found in the prefix cache at the first admission
        self.block_hashes: list[int] = []  # chained hash of every full block of `tokens`
        self.registered = 0  # number of leading blocks in the prefix cache
        self.last_cached: CachedBlock | None = None  # entry of the last of them

    @property
    def output_ids(self) -> list[int]:
        """Sampled tokens so far, including a stop id."""
        return self.tokens[self.prompt_len :]

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.state.value}, computed {self.computed} of {len(self.tokens)} known + {self.pending} pending "
            f"({self.prompt_len} prompt, at most {self.max_tokens} output), {len(self.block_ids)} blocks)"
        )
