"""gristmill inside lm-evaluation-harness (Gao et al., 2024, zenodo.12608602): the model ``gristmill``.

    python -m gristmill.integrations.lm_eval --model gristmill --model_args pretrained=MODEL --tasks TASK

The harness is imported with the first name that needs it, after its version was checked. docs/embedding/lm_eval.md has commands and output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.integrations.host import host_names

if TYPE_CHECKING:
    from gristmill.integrations.lm_eval.model import GristmillLM as GristmillLM
    from gristmill.integrations.lm_eval.register import register as register
    from gristmill.integrations.lm_eval.version import HOST as HOST
else:
    __getattr__, __dir__, __all__ = host_names(__name__, __file__)
