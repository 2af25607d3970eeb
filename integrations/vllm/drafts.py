"""Drafts for vLLM's scheduler (``--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'``): from the text of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from gristmill.integrations.vllm.requests import ActiveRequest
from gristmill.runtime.speculation import DraftRequest
from gristmill.runtime.speculation.ngram import NgramProposer

METHODS = ("ngram",)
"""Values of ``method``. Others draft by a model, which the worker does not load."""


class Drafts:
    """The drafts of a worker, with the limits of a `vllm.config.SpeculativeConfig`."""

    def __init__(self, speculative_config: Any) -> None:
        self.count = int(speculative_config.num_speculative_tokens)
        self.proposer = NgramProposer(
            speculative_config.prompt_lookup_min, speculative_config.prompt_lookup_max
        )

    def propose(self, requests: Sequence[ActiveRequest]) -> DraftTokenIds:
        """Drafts after the known tokens of these requests, for vLLM to schedule and the model to verify: they change no ids."""
        drafts = self.proposer.propose(
            [DraftRequest(one.id, one.tokens, one.prompt_len, self.count, one.row) for one in requests]
        )
        return DraftTokenIds([one.id for one in requests], drafts)

    def ended(self, names: Sequence[str]) -> None:
        """These requests have ended, or never had drafts."""
        for name in names:
            self.proposer.ended(name, (), 0)
