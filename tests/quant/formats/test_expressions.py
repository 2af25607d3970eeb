"""Regular expressions of checkpoints: those in use are taken, those whose matching could take forever are refused."""

from __future__ import annotations

import re
import time

import pytest

from gristmill.quant.formats.contract import FormatError
from gristmill.quant.formats.expressions import expression

NAME = "model.layers.17.mlp.experts.203.down_proj"


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        (".*lm_head", False),
        (r"model.layers.\d+.mlp.gate$", False),
        (r"model\.layers\.\d+\.mlp\..*", True),
        (".*(q|k|v|o|gate|up|down)_proj", True),
        (r"^(?!.*\.layers\.\d+\.mlp\.experts\.\d+\..*).*$", False),
        (r".*\.(?:" + "|".join(map(str, range(61))) + r")\..*\.(?:gate|up|down)_proj$", True),
        (r"(?i)(?:MODEL\.)?layers\.[0-9]{1,2}\.(self_attn|mlp)\..*", True),
        (".*.*.*.*.*.*[0-9]$", False),
    ],
)
def test_matches_as_re(text: str, matches: bool) -> None:
    assert (
        (expression(text, "ignore").match(NAME) is not None) == matches == (re.match(text, NAME) is not None)
    )


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+b",
        "(.*)*b",
        "(a|aa)+b",
        "(a?){30}a{30}",
        "a?" * 30 + "a" * 30,
        ".*" * 7 + "b",
        "(a|a)" * 30 + "b",
        "(?=(a+)+b)",
        "(?:a+)*+b",
        "(a)?(?(1)(a+)+|b)c",
        "(?:(?:(?:){9999}){9999}){9999}",
    ],
)
def test_could_take_forever(text: str) -> None:
    start = time.thread_time()
    with pytest.raises(FormatError, match="^ignore: matching .* could take forever"):
        expression(text, "ignore")
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("((", "is no regular expression: missing"),
        ("a" * 5000, "a regular expression of 5000 characters, over 4096"),
        ("(" * 2000 + ")" * 2000, "is no regular expression: maximum recursion depth"),
    ],
)
def test_no_expression(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=f"^ignore: .*{message}"):
        expression(text, "ignore")
