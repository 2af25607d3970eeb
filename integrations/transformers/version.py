"""The versions of transformers that are served: those that the tests ran."""

from __future__ import annotations

from gristmill.integrations.host import Host

HOST = Host("transformers", ("transformers",), "5.17", "5.24")
