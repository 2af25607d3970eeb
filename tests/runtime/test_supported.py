"""Model families and checkpoint formats are discovered, named by no other code, and plugins that fail are
left out and reported."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill.quant import formats
from gristmill.runtime import models
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.loader.config import parse_config
from gristmill.tools.cli import cli
from tests.registry.test_plugins import install
from tests.runtime import proofs

ROOT = Path(__file__).parents[2]
FAMILY = """
from gristmill.runtime.models import Family
from gristmill.runtime.models.llama import Llama, decoder_table

FAMILY = Family("Grain", {"GrainForCausalLM": "grain"}, decoder_table, Llama)
"""
FORMAT = """
from gristmill.quant.formats import FormatSpec
from gristmill.quant.formats.awq import Awq

FORMAT = FormatSpec("grain", Awq)
"""
CONFIG = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs distributions with one entry point each, and discovers the declarations again."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(**sources: tuple[str, str]) -> None:
        for name, (group, source) in sources.items():
            install(tmp_path, name, source, group)
        importlib.invalidate_caches()
        models._declared.cache_clear()
        formats._declared.cache_clear()

    yield add
    monkeypatch.undo()
    models._declared.cache_clear()
    formats._declared.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("gm_"):
            del sys.modules[name]


def supported() -> Any:
    result = CliRunner().invoke(cli, ["supported", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_plugins_are_found_like_our_own(plugins: Callable[..., None]) -> None:
    plain = supported()
    assert "hermes" in {one["name"] for one in plain["chat_formats"]}
    assert plain["plugins_left_out"] == [] and len(plain["families"]) > 9 and len(plain["formats"]) == 8
    plugins(grain=("gristmill.models", FAMILY), grist=("gristmill.formats", FORMAT))
    listing = supported()
    assert {"name": "Grain", "architectures": ["GrainForCausalLM"], "gguf": []} in listing["families"]
    assert {"name": "grain", "written": False} in listing["formats"]
    config = parse_config(
        {**CONFIG, "architectures": ["GrainForCausalLM"], "quantization_config": {"quant_method": "grain"}}
    )
    assert len(models.model_table(config).weights) > 10


@pytest.mark.parametrize(
    ("group", "source", "reason"),
    [
        ("gristmill.models", "import gm_no_such_module\n", "ModuleNotFoundError"),
        ("gristmill.models", "FAMILY = 5\n", "TypeError: FAMILY must be a Family, got int"),
        ("gristmill.models", "\n", "AttributeError: .* has no attribute 'FAMILY'"),
        (
            "gristmill.models",
            FAMILY.replace('{"GrainForCausalLM": "grain"}', '{"A": "a", "LlamaForCausalLM": "llama"}'),
            "names that are not taken, got 'LlamaForCausalLM'",
        ),
        ("gristmill.formats", "raise SystemExit(3)\n", "SystemExit: 3"),
        ("gristmill.formats", FORMAT.replace('"grain"', '"gptq"'), "names that are not taken, got 'gptq'"),
        (
            "gristmill.formats",
            FAMILY.replace("FAMILY =", "FORMAT ="),
            "FORMAT must be a FormatSpec, got Family",
        ),
    ],
)
def test_a_plugin_that_fails_is_reported_and_breaks_nothing(
    plugins: Callable[..., None], group: str, source: str, reason: str
) -> None:
    before = supported()
    plugins(bad=(group, source), good=("gristmill.models", FAMILY))
    listing = supported()
    (failure,) = listing.pop("plugins_left_out")
    assert (failure["group"], failure["name"]) == (group, "bad") and re.search(reason, failure["reason"])
    assert listing["formats"] == before["formats"]
    assert len(listing["families"]) == len(before["families"]) + 1
    text = CliRunner().invoke(cli, ["supported"], catch_exceptions=False)
    assert "plugin bad (gm_bad, from gm-bad 1.0): " in text.output
    if group == "gristmill.models":
        with pytest.raises(
            ConfigError, match=r"architecture X is not supported; known: .*; plugin bad \(gm_bad"
        ):
            parse_config({**CONFIG, "architectures": ["X"]})
    else:
        with pytest.raises(
            formats.FormatError, match=r"'x' is not supported; known: .*; plugin bad \(gm_bad"
        ):
            formats.open_format({"quant_method": "x"})


def test_nobody_else_names_a_family_or_a_format() -> None:
    """Outside their own folders, no code of the package names an architecture, or the module of a family or a
    format.

    The plain decoder, which ``gristmill.runtime`` offers to families in other files, has to be imported from
    somewhere.
    """
    families = {family.table.__module__.rpartition(".")[2] for family in models.families().values()}
    modules = {spec.read.__module__.rpartition(".")[2] for spec in formats.checkpoint_formats().values()}
    assert "deepseek_v3" in families and {"gptq", "deepseek_fp8"} < modules
    architectures = "|".join(models.families())
    named = re.compile(
        rf"{architectures}|runtime\.models\.({'|'.join(families)})\b|quant\.formats\.({'|'.join(modules - {'gguf'})})\b"
    )
    assert named.search("from gristmill.runtime.models.llama import Llama") and named.search(
        "LlamaForCausalLM"
    )
    match = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in (
            "quant",
            "runtime",
            "serve",
            "tools",
            "kernels",
            "autotune",
            "kernel_registry",
            "src/gristmill",
        )
        for file in (ROOT / folder).glob("*.py" if folder.startswith("src") else "**/*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if named.search(line)
        and file.parent not in (ROOT / "runtime" / "models", ROOT / "quant" / "formats")
        and not re.fullmatch(r" *from gristmill\.runtime\.models\.llama import (\w+) as \1", line)
    ]
    assert match == []


def test_what_was_proven() -> None:
    """Every architecture stands in the table, with the greedy ids of a test; every GGUF architecture with a file of a test."""
    listed = {one["name"]: one["proven"] for one in supported()["architectures"]}
    assert [*listed] == [*models.families(), *models.text_parts()] and listed == json.loads(
        json.dumps(proofs.facts())
    )
    assert listed["LlamaForCausalLM"]["logits and ids"] == [
        "CPU",
        "H200 (bench/results/h200/pytest_gpu.json)",
    ]
    lacking = [name for name, proven in listed.items() if "CPU" not in proven["logits and ids"]]
    assert lacking == [], "tests compare none of these with transformers"
    written = {(gguf.model, str(gguf)) for family in models.families().values() for gguf in family.gguf}
    assert written <= {(name, gguf) for name, proven in listed.items() for gguf in proven["GGUF"]}


def test_a_claim_needs_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that no test proves is out of date, and a GPU without a run is refused."""
    page = tmp_path / "supported.md"
    page.write_text(
        proofs.PAGE.read_text(encoding="utf-8").replace("| awq, comp", "| awq, exl2, comp"), encoding="utf-8"
    )
    monkeypatch.setattr(proofs, "PAGE", page)
    assert "exl2" in page.read_text(encoding="utf-8") and proofs.page() != page.read_text(encoding="utf-8")

    @proofs.proves("ranks", "2", {"a": "A", "c": "C"})
    @pytest.mark.parametrize(("name", "x"), [("a", 1), pytest.param("b", 2, marks=pytest.mark.slow)])
    def function(name: str, x: int) -> None:
        pass

    assert proofs.values(function, "name") == ["a", "b"] and function.proofs[0].what == "2"
    with pytest.raises(ValueError, match="no parameter 'family'"):
        proofs.values(function, "family")
    with pytest.raises(ValueError, match="has no run in which"):
        proofs.recorded(Path(__file__), function, proofs.ROOT / "bench/results/h200/pytest_gpu.json", [""])
    with pytest.raises(ValueError, match="one of the columns"):
        proofs.proves("speed", "high", "LlamaForCausalLM")


def test_a_gpu_needs_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a result file nothing is proven; with one, what no case of an architecture has failed."""

    @proofs.proves(
        "ranks",
        "a GPU",
        {"a": "LlamaForCausalLM", "b": "LlamaForCausalLM", "c": "Qwen2ForCausalLM"},
        record="*/runs.json",
    )
    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_it(name: str) -> None:
        pass

    folder = tmp_path / "h100"
    folder.mkdir()
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    monkeypatch.setattr(proofs, "tests", lambda: iter([(tmp_path / "tests" / "test_x.py", test_it)]))

    def proven(failed: list[str], command: str = "pytest -n 14 tests/test_x.py") -> dict[str, list[str]]:
        run = {"command": command, "device": "NVIDIA H100", "failed": failed}
        (folder / "runs.json").write_text(json.dumps({"runs": [run]}), encoding="utf-8")
        return {name: found for name, cells in proofs.facts().items() if (found := cells["ranks"])}

    assert not any(cells["ranks"] for cells in proofs.facts().values())
    found = ["H100 (h100/runs.json)"]
    assert proven([]) == {"LlamaForCausalLM": found, "Qwen2ForCausalLM": found}
    assert proven(["test_it[b]", "test_other"]) == {"Qwen2ForCausalLM": found}
    for failed, command in (
        (["test_it (2 cases)"], "pytest tests/test_x.py"),
        ([], "pytest tests/test_y.py"),
        ([], "pytest tests/test_x.py -k a"),
        ([], "pytest -m 'gpu and alone' tests"),
    ):
        with pytest.raises(ValueError, match="has no run in which"):
            proven(failed, command)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "supported; nearest: LlamaForCausalLM; known: "),
        ({"architectures": ["OPTForCausalLM"]}, "supported; known: "),
        (
            {"hidden_act": "relu2", "layer_types": ["full_attention", "linear_attention"], "rope_theta": 5.0},
            "nearest: Qwen3ForCausalLM; of its configuration, no layer knows hidden_act='relu2', layer_types linear_attention; known: ",
        ),
        (
            {"rope_scaling": {"type": "dynamic"}, "linear_num_value_heads": 32, "use_conv_bias": False},
            "no layer knows rope_type='dynamic', linear_num_value_heads=32; known: ",
        ),
        (
            {f"ssm_{i}": "x" * 40 for i in range(10)},
            r"ssm_7='xxxxxxxxxxxxxxxxxxxxxxxxxx\.\.\. and 2 more; known",
        ),
    ],
)
def test_an_unknown_architecture(changes: dict[str, Any], message: str) -> None:
    """The nearest known one, and what its configuration has that no layer computes; nothing about what every family reads."""
    with pytest.raises(ConfigError, match=message):
        parse_config(
            {**CONFIG, "architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.1, **changes}
        )
