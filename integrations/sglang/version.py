"""The versions of SGLang that are served."""

from __future__ import annotations

from gristmill.integrations.host import Host

HOST = Host("SGLang", ("sglang",), "0.5.23", "0.5.24")
