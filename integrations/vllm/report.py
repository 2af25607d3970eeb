"""What of vLLM's model runs on gristmill's kernels, and why the rest does not."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from gristmill.integrations.report import Report

REPORT = Report("vLLM", init_logger(f"vllm.{__name__}"))


def explain() -> list[dict[str, Any]]:
    """The layers of this process's models, as dicts of `gristmill.integrations.report.Layer`."""
    return REPORT.explain()


class Explain:
    """A mixin for vLLM's worker: ``--worker-extension-cls gristmill.integrations.vllm.Explain``, then ``collective_rpc("gristmill_explain")``."""

    def gristmill_explain(self) -> list[dict[str, Any]]:
        """`explain` in the worker's process."""
        return explain()
