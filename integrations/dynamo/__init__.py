"""gristmill as an engine of NVIDIA Dynamo: a worker behind its frontend and router.

    python -m gristmill.integrations.dynamo --model MODEL

Dynamo is imported with the first name that needs it, after its version was checked. docs/embedding/dynamo.md has commands and output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.integrations.host import host_names

if TYPE_CHECKING:
    from gristmill.integrations.dynamo.engine import GristmillEngine as GristmillEngine
    from gristmill.integrations.dynamo.version import HOST as HOST
else:
    __getattr__, __dir__, __all__ = host_names(__name__, __file__)
