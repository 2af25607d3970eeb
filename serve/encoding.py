"""JSON of responses."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder(enc_hook=str).encode


def encode(value: Any) -> bytes:
    """A value as JSON text; what JSON lacks, as text."""
    return _encode(value)
