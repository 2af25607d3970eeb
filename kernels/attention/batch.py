"""AttentionBatch: what one step of a model means to its attention layers, made once and read by every layer.

The tensors live on the device; the bounds beside them are known to the host, so that no kernel has to ask the device
for a length. `AttentionBuffers` keeps the tensors of successive steps at fixed addresses, as captured graphs need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gristmill.kernels.attention.lengths import starts

if TYPE_CHECKING:
    import torch

NO_SLOT = -1
"""What slot_mapping holds for a token whose key and value are not to be written."""


@dataclass(frozen=True)
class AttentionBatch:
    """One step: sequence i has new tokens query_start[i] .. query_start[i+1], the last of its seq_lens[i] context tokens.

    query_start int32 [seqs + 1], seq_lens int32 [seqs], block_table int32 [seqs, max_blocks], slot_mapping int64 [tokens]
    (block · block_size + offset of each new token, NO_SLOT = not written). max_q and max_ctx bound the new tokens and
    the context of a sequence; total_ctx is the sum of the contexts.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    tokens: int
    seqs: int
    max_q: int
    max_ctx: int
    total_ctx: int


class AttentionBuffers:
    """Tensors for steps of up to `tokens` new tokens in `seqs` sequences of up to `blocks` cache blocks each.

    `fill` writes a step into them and returns views of what it used: the same step size always has the same addresses.
    Steps are put together in pinned host memory where there is a GPU, and copied without waiting for it.
    """

    def __init__(self, tokens: int, seqs: int, blocks: int, device: str | torch.device = "cpu") -> None:
        import torch

        if min(tokens, seqs, blocks) < 1:
            raise ValueError(f"AttentionBuffers: need at least one token, sequence and block, got {tokens}, {seqs}, {blocks}")
        self.tokens, self.seqs, self.blocks = tokens, seqs, blocks
        self.device = torch.device(device)
        shapes: tuple[tuple[str, tuple[int, ...], Any], ...] = (
            ("query_start", (seqs + 1,), torch.int32),
            ("seq_lens", (seqs,), torch.int32),
            ("block_table", (seqs, blocks), torch.int32),
            ("slot_mapping", (tokens,), torch.int64),
        )
        self._device = {name: torch.zeros(shape, dtype=dtype, device=self.device) for name, shape, dtype in shapes}
        pinned = self.device.type == "cuda"
        self._host = {name: torch.zeros(shape, dtype=dtype, pin_memory=pinned) for name, shape, dtype in shapes}
        self._copied = torch.cuda.Event() if pinned else None

    def fill(
        self, queries: Sequence[int], contexts: Sequence[int], tables: Sequence[Sequence[int]], block_size: int,
        *, max_q: int | None = None, max_ctx: int | None = None,
    ) -> AttentionBatch:  # fmt: skip
        """The step in which sequence i has queries[i] new tokens, the last of contexts[i], in cache blocks tables[i].

        max_q, max_ctx: bounds to state instead of the exact maxima, for a graph that is replayed with other lengths.
        ValueError for a step that does not fit, in the buffers or in its own bounds.
        """
        tokens, seqs = sum(queries), len(queries)
        self._check(queries, contexts, tables, block_size)
        most_q, most_ctx = max([1, *queries]), max([1, *contexts])
        max_q, max_ctx = max_q or most_q, max_ctx or most_ctx
        if max_q < most_q or max_ctx < most_ctx:
            raise ValueError(f"AttentionBatch: max_q {max_q} or max_ctx {max_ctx} is under this step's {most_q} and {most_ctx}")
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy may still read the host buffers
        import torch

        host = self._host
        host["query_start"][: seqs + 1] = torch.tensor(starts(queries), dtype=torch.int32)
        host["seq_lens"][:seqs] = torch.tensor(contexts, dtype=torch.int32)
        begin = 0
        for index, (count, context, table) in enumerate(zip(queries, contexts, tables, strict=True)):
            row = torch.tensor(table, dtype=torch.int64)
            host["block_table"][index, : len(table)] = row
            position = torch.arange(context - count, context)
            host["slot_mapping"][begin : begin + count] = row[position // block_size] * block_size + position % block_size
            begin += count
        used = {"query_start": seqs + 1, "seq_lens": seqs, "block_table": seqs, "slot_mapping": tokens}
        for name, rows in used.items():
            self._device[name][:rows].copy_(host[name][:rows], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        views = {name: self._device[name][:rows] for name, rows in used.items()}
        return AttentionBatch(**views, tokens=tokens, seqs=seqs, max_q=max_q, max_ctx=max_ctx, total_ctx=sum(contexts))

    def _check(
        self, queries: Sequence[int], contexts: Sequence[int], tables: Sequence[Sequence[int]], block_size: int
    ) -> None:
        if not len(queries) == len(contexts) == len(tables) >= 1:
            raise ValueError(f"AttentionBatch: {len(queries)} query lengths, {len(contexts)} contexts, {len(tables)} tables; "
                             "expected as many of each, and one at least")  # fmt: skip
        if sum(queries) > self.tokens or len(queries) > self.seqs:
            raise ValueError(f"AttentionBatch: {sum(queries)} tokens in {len(queries)} sequences do not fit in buffers for "
                             f"{self.tokens} in {self.seqs}")  # fmt: skip
        for index, (count, context, table) in enumerate(zip(queries, contexts, tables, strict=True)):
            if not 0 <= count <= context:
                raise ValueError(f"AttentionBatch: sequence {index} has {count} new tokens in a context of {context}")
            if len(table) > self.blocks or len(table) * block_size < context:
                raise ValueError(f"AttentionBatch: sequence {index} has {len(table)} blocks of {block_size} for a context of "
                                 f"{context}; buffers hold {self.blocks} blocks a sequence")  # fmt: skip


def attention_batch(
    queries: Sequence[int], contexts: Sequence[int], tables: Sequence[Sequence[int]], block_size: int,
    device: str | torch.device = "cpu",
) -> AttentionBatch:  # fmt: skip
    """One step in memory of its own: see `AttentionBuffers.fill`."""
    blocks = max([1, *(len(table) for table in tables)])
    return AttentionBuffers(max(1, sum(queries)), max(1, len(queries)), blocks, device).fill(queries, contexts, tables, block_size)
