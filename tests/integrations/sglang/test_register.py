"""The entry point: SGLang's arguments take our names, twice without harm, other plugins keep theirs, and nothing raises."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import subprocess
import sys
from typing import Any

import pytest
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, QUANTIZATION_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig

from gristmill.integrations import Host
from gristmill.integrations.sglang import GristmillAttention, GristmillConfig, register
from gristmill.integrations.sglang.linear import GristmillLinearMethod
from tests.integrations.sglang.conftest import ROOT

MODULE = "gristmill.integrations.sglang.register"


def test_the_entry_point_is_registered() -> None:
    entries = importlib.metadata.entry_points(group="sglang.srt.plugins")
    (entry,) = [entry for entry in entries if entry.name == "gristmill"]
    assert entry.load() is register


def test_registering_twice_changes_nothing_more() -> None:
    for _ in range(2):
        register()
        assert ATTENTION_BACKEND_CHOICES.count("gristmill") == QUANTIZATION_CHOICES.count("gristmill") == 1
    assert get_quantization_config("gristmill") is GristmillConfig


def test_another_plugins_names_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other: Any = object()
    monkeypatch.setitem(ATTENTION_BACKENDS, "gristmill", other)
    monkeypatch.setitem(QUANTIZATION_METHODS, "gristmill", other)
    with caplog.at_level(logging.WARNING, "gristmill"):
        register()
    assert ATTENTION_BACKENDS["gristmill"] is QUANTIZATION_METHODS["gristmill"] is other
    for what in ("attention backend", "quantization method"):
        assert f"another plugin has the {what} gristmill; it stays" in caplog.text


@pytest.mark.parametrize("minimum,below", [("99.0", "100.0"), ("0.1", "0.2")])
def test_another_version_is_one_warning(
    minimum: str, below: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules[MODULE], "HOST", Host("SGLang", ("sglang",), minimum, below))
    with caplog.at_level(logging.WARNING, "gristmill"):
        register()
    (record,) = caplog.records
    assert f"gristmill serves SGLang >={minimum},<{below}, and sglang 0.5.23" in record.getMessage()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (GristmillAttention, AttentionBackend),
        (GristmillConfig, QuantizationConfig),
        (GristmillLinearMethod, LinearMethodBase),
    ],
)
def test_the_methods_take_what_sglang_passes(ours: Any, theirs: Any) -> None:
    assert not getattr(ours, "__abstractmethods__", None)
    for name, method in vars(ours).items():
        if name in vars(theirs) and inspect.isfunction(method) and name != "__init__":
            expected = [p for p in inspect.signature(vars(theirs)[name]).parameters if p != "kwargs"]
            given = inspect.signature(method).parameters
            variadic = any(p.kind is p.VAR_POSITIONAL for p in given.values())
            assert variadic or set(expected) <= {*given, "extra_weight_attrs"}, name


def test_importing_the_package_imports_no_host() -> None:
    code = "import sys, gristmill.integrations.sglang; assert not {'sglang', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})
