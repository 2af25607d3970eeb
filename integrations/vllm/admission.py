"""Refusing a request before it is scheduled: in vLLM's front end, as HTTP 400, while the server keeps running."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.v1.sample.logits_processor import LogitsProcessor

from gristmill.integrations.vllm.sampling import check

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor
except ModuleNotFoundError:  # in vLLM 0.24 both runners have one interface
    V2LogitsProcessor = object

ADMISSION = "gristmill.integrations.vllm:Admission"
"""The class as vLLM's option ``--logits-processors`` names it."""


class Admission(LogitsProcessor, V2LogitsProcessor):  # type: ignore[misc]  # vLLM is read without types
    """Validates the sampling parameters of every request, as a logits processor of either of vLLM's model runners.

    vLLM's front end calls `validate_params` of the classes that its option ``logits_processors`` names. The worker samples by
    itself, so no instance is made.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """UsageError, a ValueError that vLLM answers with HTTP 400, if the runtime does not serve the parameters."""
        check(sampling_params)

    def __new__(cls, *_: Any) -> NoReturn:
        """An instance would belong to another worker."""
        raise RuntimeError(
            f"{ADMISSION} only serves --worker-cls gristmill.integrations.vllm.Worker: leave it out of --logits-processors"
        )
