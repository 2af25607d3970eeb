"""Formats in which experts take activations: those whose scales do not depend on other rows."""

from __future__ import annotations

from gristmill.kernel_registry.scheme import QuantScheme

ROWS = ("fp8_token", "fp8_g128", "int8_token", "int8_g32", "int8_g128", "mxfp8", "mxfp4", "nvfp4")
"""So that a token's result does not depend on the others either: nvfp4 has a multiplier for each row."""


def misfit(w: str) -> str | None:
    """Why experts do not take activations in the format of a scheme; None if they do, or it has none."""
    codes = QuantScheme.parse(w).activation
    if codes is None or codes in ROWS:
        return None
    return f"activations are quantized a row at a time ({', '.join(ROWS)}), not as {codes}"
