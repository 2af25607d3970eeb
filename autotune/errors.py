"""Errors of verification and preparation, separate from the modules that raise them."""

from __future__ import annotations


class UnverifiableError(RuntimeError):
    """Nothing can be said of a kernel here and now: its arguments could not be made, or memory ran out."""


class UnpreparedError(RuntimeError):
    """A call of an unprepared size while preparing is impossible: CUDA-graph capture, or plans that are sealed."""
