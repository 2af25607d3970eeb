"""Ports for the servers of hosts."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """Below those that the kernel gives to connections: another process would have one before the server binds it. Dynamo reads an i16."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
