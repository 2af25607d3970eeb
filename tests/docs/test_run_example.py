"""examples/run.py, which `make run` runs, writes plain text to a file."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from gristmill import LLM, console
from gristmill.runtime import Chunk
from gristmill.tools.chat import ModelUnavailableError, Session

ROOT = Path(__file__).parents[2]


def _example():
    spec = importlib.util.spec_from_file_location("gristmill_examples_run", ROOT / "examples" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Canned:
    """A model that generates two fixed chunks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stream(self, prompt: str, params: object):
        yield Chunk(0, (1,), " a [bold] copy")
        yield Chunk(0, (2,), " of it.", "length")


def test_no_markup_in_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = _example()
    monkeypatch.setattr(example, "LLM", Canned)
    example.answer("docs-llama")
    lines = capsys.readouterr().out.splitlines()
    # The model's brackets are preserved.
    assert lines[0] == f"docs-llama (bf16): {example.PROMPT} a [bold] copy of it."
    assert lines[1].startswith("  [2 tokens in ")


def test_the_name_is_bold_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = _example()
    monkeypatch.setattr(example, "LLM", Canned)
    monkeypatch.setattr(
        console,
        "out",
        lambda: Console(force_terminal=True, color_system="standard", markup=False, highlight=False),
    )
    example.answer("docs-llama")
    assert "\x1b[1mdocs-llama\x1b[0m (bf16)" in capsys.readouterr().out


def test_without_a_chat_model_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = _example()

    def unavailable() -> Path:
        raise ModelUnavailableError("the package index is out of reach")

    monkeypatch.setattr(example, "default_model", unavailable)
    monkeypatch.setattr(example, "LLM", None)
    example.converse()
    assert capsys.readouterr().out == "\nNo chat model: the package index is out of reach\n"


def test_the_chat_model_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the smallest example model in the place of the one that is fetched."""
    example = _example()
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    monkeypatch.setattr(example, "default_model", lambda: example.MODELS / "docs-llama")
    options = {"device": "cpu", "num_blocks": 32, "warm": "off", "dtype": "fp32"}
    monkeypatch.setattr(example, "LLM", lambda path: LLM(path, **options))
    of = partial(Session.of, template=str(template))
    monkeypatch.setattr(example, "Session", SimpleNamespace(of=of))
    example.converse()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"SmolLM2-135M-Instruct (Apache-2.0): {example.QUESTION}"
    assert re.fullmatch(r"  \[\d+ tokens in [\d.]+ s\]", lines[-1]) and len(lines) > 3


def test_the_readme_has_the_weights_that_a_run_reports() -> None:
    """The bytes of the table's models do not depend on the machine's speed, so an old table shows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(docs-\w+) +(\w+) +[\d.]+ +[\d.]+ +([\d.]+) +\d+$", text, re.M)
    example = _example()
    assert [row[:2] for row in rows] == list(product(example.NAMES, example.SCHEMES.split(",")))
    for name, scheme, shown in rows:
        llm = LLM(
            example.MODELS / name,
            dtype="bf16",
            quant=None if scheme == "bf16" else scheme,
            device="cpu",
            num_blocks=8,
            warm="off",
        )
        assert f"{llm.weight_bytes / 1e6:.2f}" == shown, (name, scheme)
