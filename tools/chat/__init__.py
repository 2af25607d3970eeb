"""`gristmill chat`: a conversation with a model in the terminal, or over pipes. Names are imported on first access."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.runtime.default_model import DEFAULT as DEFAULT
    from gristmill.runtime.default_model import ModelUnavailableError as ModelUnavailableError
    from gristmill.runtime.default_model import default_model as default_model
    from gristmill.tools.chat.session import Answer as Answer
    from gristmill.tools.chat.session import Session as Session
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
