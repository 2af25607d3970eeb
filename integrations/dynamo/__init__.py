"""gristmill as an engine of NVIDIA Dynamo: a worker behind its frontend and router.

    python -m gristmill.integrations.dynamo --model MODEL

Dynamo is imported with the first name that needs it, after its version was checked. docs/embedding/dynamo.md has commands and output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.integrations.dynamo.engine import GristmillEngine as GristmillEngine
    from gristmill.integrations.dynamo.version import HOST as HOST
else:
    _get, __dir__, __all__ = lazy_names(__name__, __file__)

    def __getattr__(name: str) -> Any:
        if name in __all__ and name != "HOST":
            _get("HOST").require()
        return _get(name)
