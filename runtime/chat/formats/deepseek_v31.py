"""Calls as a name and JSON between DeepSeek's tags, thoughts in ``<think>``: DeepSeek V3.1."""

from __future__ import annotations

import re

from gristmill.runtime.chat.formats._deepseek import deepseek_format

FORMAT = deepseek_format(
    "deepseek_v31",
    "<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}: DeepSeek V3.1",
    (),
    re.compile(r"\s*(?P<name>[^\s<{]+)\s*<｜tool▁sep｜>\s*"),
    lambda name: f"{name}<｜tool▁sep｜>",
    "",
    "",
)
