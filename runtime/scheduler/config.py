"""Budgets and policies of a scheduler, validated on construction."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, get_args

from gristmill.runtime.kv_cache import blocks_needed

PolicyName = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The budgets of a step, and policies.

    num_blocks, block_size      the KV pool: blocks, and tokens per block
    windows                     of each group of layers (`kv_cache.groups`), the keys that a query sees; 0 = all. The first is 0
    max_batch_tokens            tokens that a step feeds to the model, drafts included; buffers may be sized by it
    max_seqs                    requests that run at the same time
    max_model_len               longest prompt + output of one request; None: whatever the pool holds
    max_chunk                   prompt tokens of one request in one step; None: no limit but max_batch_tokens
    inter_prefill_budget        prompt tokens that a step may add after its first prefill; None: no limit. In a step
                                that is compute-bound already a second prefill only delays the first
    max_bypass                  younger requests that may be admitted before one that waits for blocks; 0: strict order
    max_queued                  waiting requests beyond which `add` refuses; None: no limit
    max_queued_tokens           prompt tokens of waiting requests beyond which `add` refuses; None: no limit
    watermark                   fraction of the pool kept free at admission while others run, so that they can grow
    policy                      "fcfs", or "priority": lower value first, then arrival
    priority_span               with "priority": younger requests that may pass a request for each level that they are ahead of
                                it, so that no request starves; None: any number
    prefix_caching              share full blocks between requests
    align_chunks                let every chunk but a prompt's last end at a block boundary, so that a prompt is split
                                in the same way whether or not its prefix was cached (same shapes, hence same rounding)
    """

    num_blocks: int
    block_size: int = 16
    max_batch_tokens: int = 2048
    max_seqs: int = 256
    max_model_len: int | None = None
    max_chunk: int | None = None
    inter_prefill_budget: int | None = None
    max_bypass: int = 8
    max_queued: int | None = None
    max_queued_tokens: int | None = None
    watermark: float = 0.01
    policy: PolicyName = "fcfs"
    priority_span: int | None = 256
    prefix_caching: bool = True
    align_chunks: bool = False
    windows: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batch_tokens", "max_seqs"):
            self._require_int(name, 1)
        self._require_int("max_bypass", 0)
        for name, least in (
            ("max_model_len", 2),
            ("max_chunk", 1),
            ("inter_prefill_budget", 0),
            ("max_queued", 0),
            ("max_queued_tokens", 0),
            ("priority_span", 1),
        ):
            if getattr(self, name) is not None:
                self._require_int(name, least)
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.policy not in get_args(PolicyName):
            raise ValueError(
                f"unknown policy {self.policy!r}, expected one of {', '.join(get_args(PolicyName))}"
            )
        if self.windows[:1] != (0,) or min(self.windows) < 0:
            raise ValueError(
                f"windows must begin with 0, a group of full attention, and be at least 0, got {self.windows}"
            )
        if self.capacity < 2 <= (self.max_model_len or 2):
            raise ValueError("the pool holds one token: no request (one prompt token, one output token) fits")
        if self.max_batch_tokens < self.max_seqs:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_seqs ({self.max_seqs}): "
                "a step must have room for one token of every running request"
            )
        if self.align_chunks:
            self._require_room_for_a_block()

    @property
    def capacity(self) -> int:
        """The maximum number of prompt and output tokens of one request."""
        rows = self.num_blocks
        if len(self.windows) > 1:
            rows = bisect_right(range(rows + 1), rows, key=lambda n: self.most_held(n * self.block_size)) - 1
        pool = rows * self.block_size
        return pool if self.max_model_len is None else min(pool, self.max_model_len)

    def places(self, tokens: int) -> int:
        """Entries of the block tables of `tokens` tokens, in all groups."""
        return len(self.windows) * blocks_needed(tokens, self.block_size)

    def most_held(self, tokens: int) -> int:
        """Blocks that a request holds at most until it has `tokens`: of a group with a window, those of the window and of a step."""
        rows = blocks_needed(tokens, self.block_size)
        if len(self.windows) == 1:
            return rows
        step = min(self.max_batch_tokens, self.max_chunk or self.max_batch_tokens)
        return sum(
            min(rows, blocks_needed(window - 1 + step, self.block_size) + 1) if window else rows
            for window in self.windows
        )

    def _require_room_for_a_block(self) -> None:
        """If a step cannot hold a block, chunks rounded down to blocks would always be empty."""
        if self.max_batch_tokens < self.max_seqs - 1 + self.block_size:
            raise ValueError(
                f"align_chunks needs max_batch_tokens >= max_seqs - 1 + block_size = "
                f"{self.max_seqs - 1 + self.block_size}, got {self.max_batch_tokens}: no aligned chunk would ever fit"
            )
        if self.max_chunk is not None and self.max_chunk < self.block_size:
            raise ValueError(
                f"align_chunks needs max_chunk >= block_size ({self.block_size}), got {self.max_chunk}: "
                "no aligned chunk would ever fit"
            )

    def _require_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
