"""gristmill inside SGLang (Zheng et al., 2024, arXiv:2312.07104): attention and linear layers of SGLang's own models.

    python -m sglang.launch_server --model-path MODEL --attention-backend gristmill --quantization gristmill

SGLang is imported with the first name that needs it, after its version was checked. docs/embedding/sglang.md says what is served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.integrations.host import host_names

if TYPE_CHECKING:
    from gristmill.integrations.sglang.attention import GristmillAttention as GristmillAttention
    from gristmill.integrations.sglang.quantization import GristmillConfig as GristmillConfig
    from gristmill.integrations.sglang.quantization import explain as explain
    from gristmill.integrations.sglang.register import register as register
    from gristmill.integrations.sglang.version import HOST as HOST
else:
    __getattr__, __dir__, __all__ = host_names(__name__, __file__, unchecked=("HOST", "register"))
