"""The versions of lm-evaluation-harness that are served: those that the tests ran."""

from __future__ import annotations

from gristmill.integrations.host import Host

HOST = Host("lm-evaluation-harness", ("lm_eval",), "0.4.13", "0.4.14")
