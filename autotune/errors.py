"""Errors of verification, separate from the modules that raise them."""

from __future__ import annotations


class UnverifiableError(RuntimeError):
    """Nothing can be said of a kernel here and now: its arguments could not be made, or memory ran out."""
