"""The versions of Ray that are served: those that the tests ran."""

from __future__ import annotations

from gristmill.integrations.host import Host

HOST = Host("Ray", ("ray",), "2.60", "2.61")
