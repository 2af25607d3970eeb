"""The gristmill command line, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.oracle import LLAMA, MODELS

MODEL = str(MODELS / LLAMA)


@pytest.fixture(scope="module")
def gristmill(tmp_path_factory: pytest.TempPathFactory):  # noqa: ANN201
    """Run the command line; its cache is the module's own."""
    cache = tmp_path_factory.mktemp("cache")
    source = Path(__file__).resolve().parents[2] / "src"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(source)}
        command = [sys.executable, "-m", "gristmill.runtime.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    return run


def test_generate(gristmill) -> None:  # noqa: ANN001
    options = ("generate", "--model", MODEL, "--prompt", "The SELECT", "--max-tokens", "8", "--dtype", "fp32")
    plain, as_json = gristmill(*options, "--explain"), gristmill(*options, "--json")
    assert (plain.returncode, as_json.returncode) == (0, 0), plain.stderr + as_json.stderr
    found = json.loads(as_json.stdout)
    assert found.keys() == {
        "prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "seconds", "tokens_per_second", "weight_bytes",
        "explain",
    }  # fmt: skip
    assert (len(found["token_ids"]), found["finish_reason"], found["explain"]) == (8, "length", None)
    assert plain.stdout.startswith(found["text"]) and "paged_attention" in plain.stdout
    assert "8 tokens in" in plain.stderr


def test_eval_and_quantize(gristmill, tmp_path: Path) -> None:  # noqa: ANN001
    tokens = str(MODELS / "eval_tokens.u16")
    options = ("--tokens", tokens, "--window", "64", "--windows", "3", "--dtype", "fp32", "--json")
    rounded = gristmill("eval", "--model", MODEL, "--quant", "int4_g128", *options)
    assert rounded.returncode == 0, rounded.stderr
    found = json.loads(rounded.stdout)
    assert found.keys() == {"loss", "perplexity", "tokens", "seconds"} and found["tokens"] == 3 * 63
    out = str(tmp_path / "out")
    written = gristmill("quantize", "--model", MODEL, "--quant", "int4_g128", "--out", out, "--json")
    assert written.returncode == 0, written.stderr
    assert json.loads(written.stdout)["scheme"] == "int4_g128"
    again = gristmill("eval", "--model", out, *options)
    assert json.loads(again.stdout)["loss"] == found["loss"]


@pytest.mark.parametrize("command", [(), ("generate",), ("eval",), ("quantize",)])
def test_help(gristmill, command: tuple[str, ...]) -> None:  # noqa: ANN001
    done = gristmill(*command, "--help")
    assert done.returncode == 0 and "--help" in done.stdout and "--json" in done.stdout + ("" if command else "--json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--model", "/absent", "--prompt", "x"), "no model directory /absent"),
        (("generate", "--model", MODEL, "--prompt", ""), "prompt is empty"),
        (("generate", "--model", MODEL, "--prompt", "x", "--quant", "int5"), "unknown scheme 'int5'"),
        (("generate", "--model", MODEL, "--prompt", "x", "--dtype", "fp7"), "unknown dtype 'fp7'"),
        (("generate", "--model", MODEL, "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", "--model", MODEL, "--prompt", "x", "--policy", "/absent.toml"), "/absent.toml"),
        (("generate", "--model", MODEL), "--prompt"),
        (("eval", "--model", MODEL, "--tokens", "/absent.u16"), "cannot read /absent.u16"),
        (("eval", "--model", MODEL, "--tokens", str(MODELS / "eval_tokens.u16"), "--windows", "9999"), "need"),
        (("quantize", "--model", MODEL, "--quant", "bf16", "--out", "/absent/x"), "not a quantized scheme"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(gristmill, arguments: tuple[str, ...], message: str) -> None:  # noqa: ANN001
    done = gristmill(*arguments, "--json")
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
