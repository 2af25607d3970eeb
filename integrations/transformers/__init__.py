"""gristmill inside Hugging Face transformers (Wolf et al., 2020, arXiv:1910.03771): attention, experts, a quantizer and norms.

    import gristmill.integrations.transformers
    gristmill.integrations.transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="gristmill", experts_implementation="gristmill")

transformers is imported with the first name that needs it, after its version was checked. docs/embedding/transformers.md has the commands
and their output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.integrations.host import host_names

if TYPE_CHECKING:
    from gristmill.integrations.transformers.norms import use_norms as use_norms
    from gristmill.integrations.transformers.quantizer import GristmillConfig as GristmillConfig
    from gristmill.integrations.transformers.register import disable as disable
    from gristmill.integrations.transformers.register import enable as enable
    from gristmill.integrations.transformers.register import explain as explain
    from gristmill.integrations.transformers.version import HOST as HOST
else:
    __getattr__, __dir__, __all__ = host_names(__name__, __file__)
