"""gristmill inside Hugging Face transformers (Wolf et al., 2020, arXiv:1910.03771): attention, experts, a quantizer and norms.

    import gristmill.integrations.transformers
    gristmill.integrations.transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="gristmill", experts_implementation="gristmill")

transformers is imported with the first name that needs it, after its version was checked. docs/embedding/transformers.md has the commands
and their output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.integrations.transformers.norms import use_norms as use_norms
    from gristmill.integrations.transformers.quantizer import GristmillConfig as GristmillConfig
    from gristmill.integrations.transformers.register import disable as disable
    from gristmill.integrations.transformers.register import enable as enable
    from gristmill.integrations.transformers.register import explain as explain
    from gristmill.integrations.transformers.version import HOST as HOST
else:
    _get, __dir__, __all__ = lazy_names(__name__, __file__)

    def __getattr__(name: str) -> Any:
        if name in __all__ and name != "HOST":
            _get("HOST").require()
        return _get(name)
