"""Calls in fenced JSON between DeepSeek's tags, thoughts in ``<think>``: DeepSeek V3 and R1."""

from __future__ import annotations

import re

from gristmill.runtime.chat.formats._deepseek import deepseek_format

FORMAT = deepseek_format(
    "deepseek_v3",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>name and fenced JSON: DeepSeek V3, R1",
    ("```json",),
    re.compile(r"\s*function\s*<｜tool▁sep｜>(?P<name>[^\n<{]+)\s*```json\s*"),
    lambda name: f"function<｜tool▁sep｜>{name}\n```json\n",
    "\n```",
    "\n",
)
