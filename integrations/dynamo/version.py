"""The versions of NVIDIA Dynamo that are served: those that the tests ran."""

from __future__ import annotations

from gristmill.integrations.host import Host

HOST = Host("NVIDIA Dynamo", ("ai-dynamo",), "1.6.1", "1.6.2")
