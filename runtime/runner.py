"""The runner: from a committed step to tensors, logits and sampled ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch, make_batch
from gristmill.runtime.cache import PagedCache
from gristmill.runtime.decode_graphs import DecodeGraphs
from gristmill.runtime.errors import UsageError
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.models import Model
from gristmill.runtime.sampler import Sampler, SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest


class Runner:
    """A model on a device with its paged cache.

    decode_graphs: run decode steps by `DecodeGraphs`; None = on a GPU. UsageError: blocks of the cache are not of the size that
    the model was loaded for.
    """

    def __init__(self, model: Model, cache: PagedCache, decode_graphs: bool | None = None) -> None:
        if cache.block_size != model.plans.block_size:
            raise UsageError(
                f"the model's attention is planned for cache blocks of {model.plans.block_size} tokens, the cache has blocks of "
                f"{cache.block_size}"
            )
        self.model = model
        self.cache = cache
        self.device = model.plans.device
        self.sampler = Sampler(model.plans, model.config.vocab_size)
        wanted = self.device.type == "cuda" if decode_graphs is None else decode_graphs
        self.decode = DecodeGraphs(model, cache, self.sampler) if wanted else None
        self.processors = LogitsProcessors(model.config.vocab_size, self.device)

    @torch.inference_mode()
    def run(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> list[int]:
        """Compute the entries of a plan; one id for each that samples (`rows`, in their order).

        Logits are computed for those alone, and the ids are all that comes back from the device.
        """
        if self.processors:
            return self._run_processed(entries, rows)
        if self.decode is not None and (ids := self.decode.run(entries, rows)) is not None:
            return ids
        batch = make_batch(entries, self.cache.block_size, self.device)
        hidden = self.model.forward(batch, self.cache)
        if not rows:
            return []
        return self.sampler(self.model.logits(hidden[batch.rows]), rows)

    def _run_processed(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> list[int]:
        """`run` with the logits between model and sampler; a decode graph ends with the logits then."""
        logits = None if self.decode is None else self.decode.logits(entries, rows)
        if logits is None:
            batch = make_batch(entries, self.cache.block_size, self.device)
            hidden = self.model.forward(batch, self.cache)
            if not rows:
                return []
            logits = self.model.logits(hidden[batch.rows])
        request_ids = [entry.id for entry in entries if entry.samples]
        return self.sampler(self.processors.apply(logits, request_ids), rows)

    @torch.inference_mode()
    def logits(self, entries: Sequence[ScheduledRequest]) -> Tensor:
        """float32 logits [tokens, vocab] of every token of the entries."""
        batch: Batch = make_batch(entries, self.cache.block_size, self.device, all_rows=True)
        return self.model.logits(self.model.forward(batch, self.cache)).float()
