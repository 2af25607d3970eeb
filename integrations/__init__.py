"""gristmill inside other programs: one package per host, ``gristmill.integrations.<host>``, imported only by users of that host.

A host package declares the versions that it serves (`Host`), and offers ``register()`` or ``enable()``, which may be called
more than once, and the function that undoes it. Packages that need kernels alone do not import the runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.integrations.host import Host as Host
    from gristmill.integrations.host import HostError as HostError
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
