"""A batch of whole sequences, one after the other without padding: what models without a KV cache compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Whole sequences on a device.

    Attributes:
        tokens: ids, int64 [tokens].
        positions: of each token in its sequence, from 0 on, int64 [tokens].
        types: token type ids, int64 [tokens]; None = all 0.
        starts: where each sequence starts, and the last one ends, int32 [sequences + 1].
        lengths: tokens of each sequence, on the host.
        seen: first tokens of each sequence that others attend to, on the host; the rest attend to these, too. None = all.
    """

    tokens: Tensor
    positions: Tensor
    types: Tensor | None
    starts: Tensor
    lengths: tuple[int, ...]
    seen: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        ids: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        types: Sequence[Sequence[int] | None] | None = None,
        seen: Sequence[int | None] | None = None,
    ) -> Sequences:
        """The batch of these token ids; `types` are those of each sequence, None = 0 everywhere; `seen` as the attribute, None = all. Copied to
        the device at once."""
        lengths = [len(each) for each in ids]
        count = sum(lengths)
        typed = types is not None and any(each is not None for each in types)
        packed = torch.empty((3 if typed else 2) * count, dtype=torch.int64)
        flat = packed.view(-1, count)
        flat[0] = torch.tensor([token for each in ids for token in each], dtype=torch.int64)
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        begins = ends - torch.tensor(lengths)
        flat[1] = torch.arange(count) - begins.repeat_interleave(torch.tensor(lengths))
        if typed and types is not None:
            rows = (each or [0] * length for each, length in zip(types, lengths, strict=True))
            flat[2] = torch.tensor([kind for row in rows for kind in row], dtype=torch.int64)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32)
        placed = packed.to(device).view(-1, count)
        typed_rows = placed[2] if typed else None
        part = None
        if seen is not None and any(count is not None for count in seen):
            part = tuple(n if count is None else count for n, count in zip(lengths, seen, strict=True))
        return cls(placed[0], placed[1], typed_rows, starts.to(device), tuple(lengths), part)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; 0 without sequences."""
        return max(self.lengths, default=0)

    @property
    def first(self) -> Tensor:
        """The row of each sequence's first token, int64 [sequences]."""
        return self.starts[:-1].long()

    @property
    def last(self) -> Tensor:
        """The row of each sequence's last token, int64 [sequences]."""
        return self.starts[1:].long() - 1
