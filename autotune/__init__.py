"""Verification, timing, resolution, bound plans, and the writer of the store.

Names are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.autotune.bound import BoundPlan as BoundPlan
    from gristmill.autotune.errors import UnpreparedError as UnpreparedError
    from gristmill.autotune.explanation import Explanation as Explanation
    from gristmill.autotune.explanation import explain as explain
    from gristmill.autotune.place import Place as Place
    from gristmill.autotune.resolve import Resolver as Resolver
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
