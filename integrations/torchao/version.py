"""The versions of torchao that are served: those that the tests ran."""

from __future__ import annotations

from gristmill.integrations.host import Host

HOST = Host("torchao", ("torchao",), "0.18", "0.19")
