"""Lines that tell the user how a model is loaded."""

from __future__ import annotations

import logging
import sys

LOG = logging.getLogger("gristmill")


def notice(text: str) -> None:
    """One line, at INFO, to the logger ``gristmill``; to stderr in a program that has not set up logging, where INFO would be lost."""
    if LOG.hasHandlers():
        LOG.info(text)
    else:
        print(f"gristmill: {text}", file=sys.stderr)
