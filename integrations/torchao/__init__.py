"""gristmill inside torchao: ``quantize_(model, GristmillConfig("int4_g128"))`` puts `gristmill.nn.Linear` into any torch model.

    from gristmill.integrations.torchao import GristmillConfig, enable
    enable()
    torchao.quantization.quantize_(model, GristmillConfig("int4_g128"))

torchao is imported with the first name that needs it, after its version was checked. `gristmill.quantize_module` does the same without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.integrations.torchao.config import GristmillConfig as GristmillConfig
    from gristmill.integrations.torchao.config import disable as disable
    from gristmill.integrations.torchao.config import enable as enable
    from gristmill.integrations.torchao.version import HOST as HOST
else:
    _get, __dir__, __all__ = lazy_names(__name__, __file__)

    def __getattr__(name: str) -> Any:
        if name in __all__ and name != "HOST":
            _get("HOST").require()
        return _get(name)
