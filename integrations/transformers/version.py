"""The versions of transformers that are served. The tests run 5.17 and 5.23; those between are taken and not tested."""

from __future__ import annotations

from gristmill.integrations.host import Host

HOST = Host("transformers", ("transformers",), "5.17", "5.24")
