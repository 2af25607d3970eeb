"""gristmill inside torchao: ``quantize_(model, GristmillConfig("int4_g128"))`` puts `gristmill.nn.Linear` into any torch model.

    from gristmill.integrations.torchao import GristmillConfig, enable
    enable()
    torchao.quantization.quantize_(model, GristmillConfig("int4_g128"))

torchao is imported with the first name that needs it, after its version was checked. `gristmill.quantize_module` does the same without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.integrations.host import host_names

if TYPE_CHECKING:
    from gristmill.integrations.torchao.config import GristmillConfig as GristmillConfig
    from gristmill.integrations.torchao.config import disable as disable
    from gristmill.integrations.torchao.config import enable as enable
    from gristmill.integrations.torchao.version import HOST as HOST
else:
    __getattr__, __dir__, __all__ = host_names(__name__, __file__)
