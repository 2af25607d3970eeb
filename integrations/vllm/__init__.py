"""gristmill inside vLLM (Kwon et al., 2023, arXiv:2309.06180): the runtime as a worker under vLLM's scheduler and server.

    vllm serve MODEL --worker-cls gristmill.integrations.vllm.Worker

vLLM is imported with the first name that needs it, after its version was checked. docs/embedding/vllm.md has the commands and their output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.integrations.host import host_names

if TYPE_CHECKING:
    from gristmill.integrations.vllm.admission import Admission as Admission
    from gristmill.integrations.vllm.plugin import register as register
    from gristmill.integrations.vllm.quantization import GristmillConfig as GristmillConfig
    from gristmill.integrations.vllm.report import Explain as Explain
    from gristmill.integrations.vllm.report import explain as explain
    from gristmill.integrations.vllm.version import HOST as HOST
    from gristmill.integrations.vllm.worker import Worker as Worker
else:
    __getattr__, __dir__, __all__ = host_names(__name__, __file__, unchecked=("HOST", "register"))
