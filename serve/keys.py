"""API keys: a file with one per line, read again when it changes."""

from __future__ import annotations

import hmac
import os
import time
from contextlib import suppress
from pathlib import Path

from gristmill.runtime.errors import UsageError

CHECK_SECONDS = 1.0
"""How often the file is looked at."""


class KeyFile:
    """The keys in a file. Lines that are empty or begin with # are none.

    Raises:
        UsageError: the file cannot be read, or has no key.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._looked = 0.0
        self._stamp: tuple[int, int, int] | None = None
        self._keys: list[bytes] = []
        self._read()

    def allows(self, key: str) -> bool:
        """Whether it is one of the keys. The time does not depend on where they differ, nor on which of them it is."""
        if (now := time.monotonic()) - self._looked > CHECK_SECONDS:
            self._looked = now
            with suppress(UsageError):  # while the file is being replaced, the keys that were read last count
                self._read()
        given, found = key.encode("utf-8", "surrogateescape"), False
        for known in self._keys:
            found |= hmac.compare_digest(given, known)
        return found

    def _read(self) -> None:
        try:
            state = os.stat(self._path)
            stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
            if stamp == self._stamp:
                return
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise UsageError(f"cannot read the keys in {self._path}: {error.strerror or error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(b"#")]
        if not keys:
            raise UsageError(f"{self._path} has no key: one per line is expected")
        self._keys, self._stamp = keys, stamp


def key_of(authorization: str, other: str) -> str:
    """The key in a request: of ``Authorization: Bearer KEY``, or of ``x-api-key: KEY``."""
    scheme, _, value = authorization.partition(" ")
    return value.strip() if scheme.lower() == "bearer" else other.strip()
