"""Logits processors applied to all logits of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.scheduler import ScheduledRequest


def cpu_plans() -> Plans:
    """Plans of a model in float32 on the CPU."""
    return Plans(torch.device("cpu"), torch.float32)


def entry(
    request_id: str, drafts: Sequence[int] = (), tokens: Sequence[int] | None = (0,)
) -> ScheduledRequest:
    """An entry that feeds the last known token, or with tokens=None one that is on the device only, and drafts."""
    fed = None if tokens is None else [*tokens, *drafts]
    count = 1 if fed is None else len(fed)
    return ScheduledRequest(request_id, 0, count, True, fed, [], [], len(drafts))


def apply(
    processors: LogitsProcessors,
    logits: torch.Tensor,
    entries: Sequence[str | ScheduledRequest],
    fed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the logits [rows, vocab] of these entries with the processed rows in float32; a name stands for an entry without drafts."""
    steps = [one if isinstance(one, ScheduledRequest) else entry(one) for one in entries]
    now, later = processors.prepare(steps)
    processed = logits.to(torch.float32, copy=True)
    if fed is None:
        fed = torch.zeros(len(logits), dtype=torch.int64)
    parts = [part for part in (now, None if later is None else later.ready()) if part is not None]
    for rows in parts:
        values, places, _ = rows.process(logits, fed)
        assert places.tolist() == rows.places
        processed[places] = values
    return processed if parts else logits
