"""Ports for the servers of hosts."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

_CLAIMS: list[socket.socket] = []


def free_port() -> int:
    """A port that no other call gets, here or in another process, as long as this process runs: hosts are tested at the same time.

    It is below those that the kernel gives to connections: another process would have one before the server binds it. Dynamo reads an i16.
    """
    while True:
        port = 20000 + secrets.randbelow(12000)
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, suppress(OSError):
            claim.bind(f"\0gristmill-test-port-{port}")  # a name without a file, which ends with the process
            probe.bind(("127.0.0.1", port))
            _CLAIMS.append(claim)
            return port
        claim.close()
