"""A block as an untrusted record: a header with size, key and digest, then the block.

8   magic, with the version of this format
8   bytes of the block, little-endian
32  key
32  SHA-256 of key and block
48  zero
"""

from __future__ import annotations

import hashlib
import struct

MAGIC = b"gmkv\0\0\0\1"
_FIELDS = struct.Struct("<8sQ32s32s48x")
HEADER = _FIELDS.size
"""Bytes before the block."""


class RecordError(ValueError):
    """Bytes that are not the record of a key; the message says what differs."""


def seal(record: memoryview, key: bytes) -> None:
    """Write the header of a record whose block is in place."""
    block = record[HEADER:]
    _FIELDS.pack_into(record, 0, MAGIC, len(block), key, _digest(key, block))


def check(record: memoryview, key: bytes, size: int) -> None:
    """Raise RecordError unless `record`, of which `size` bytes were read, is the whole record of `key`."""
    if size != len(record):
        raise RecordError(f"has {size} bytes, not {len(record)}")
    magic, nbytes, own_key, digest = _FIELDS.unpack_from(record)
    if magic != MAGIC or nbytes != len(record) - HEADER:
        raise RecordError("has another format")
    if own_key != key:
        raise RecordError("is of another block")
    if digest != _digest(key, record[HEADER:]):
        raise RecordError("has another digest than its block")


def _digest(key: bytes, block: memoryview) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(block)
    return digest.digest()
