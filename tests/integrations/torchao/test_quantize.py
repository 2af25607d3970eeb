"""torchao's `quantize_` with our configuration: values, filters, torch.compile, undoing, refusals."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.quantization import quantize_

from gristmill import nn, quantize_module
from gristmill.autotune.resolve import Resolver
from gristmill.integrations.torchao import GristmillConfig, disable, enable


@pytest.fixture(autouse=True)
def enabled(policy_file, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are taken as verified."""
    policy_file()
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)
    enable()
    enable()
    yield
    disable()


def model() -> torch.nn.Sequential:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32))


@pytest.mark.parametrize("scheme", ["int4_g64", "int8_ch", "mxfp4", "nvfp4"])
def test_it_is_what_quantize_module_makes(scheme: str) -> None:
    ours, theirs, x = quantize_module(model(), scheme), model(), torch.randn(5, 128)
    quantize_(theirs, GristmillConfig(scheme))
    assert [type(m) for m in theirs] == [nn.Linear, torch.nn.SiLU, nn.Linear]
    assert torch.equal(theirs(x), ours(x)) and not torch.equal(theirs(x), model()(x))
    other = copy.deepcopy(theirs)
    other.load_state_dict(theirs.state_dict())
    assert torch.equal(other(x), theirs(x))


def test_a_filter_chooses_layers() -> None:
    actual = model()
    quantize_(actual, GristmillConfig("int4_g64"), filter_fn=lambda module, name: name == "2")
    assert [type(m) for m in actual] == [torch.nn.Linear, torch.nn.SiLU, nn.Linear]


def test_it_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer = torch.nn.Sequential(torch.nn.Linear(128, 64))
    quantize_(layer, GristmillConfig("int4_g64"))
    x = torch.randn(5, 128)
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_refusals_and_undoing() -> None:
    assert pickle.loads(pickle.dumps(GristmillConfig("mxfp4"))) == GristmillConfig("mxfp4")
    with pytest.raises(ValueError, match="int5"):
        GristmillConfig("int5_gx")
    with pytest.raises(TypeError, match="got weight of Embedding: leave it out with filter_fn"):
        quantize_(torch.nn.Embedding(8, 64), GristmillConfig("int8_ch"), filter_fn=lambda *_: True)
    disable()
    disable()
    with pytest.raises((KeyError, NotImplementedError)):
        quantize_(model(), GristmillConfig("int8_ch"))


def test_the_block_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "embedding" / "torch.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "torchao" in b]
    scope: dict[str, Any] = {}
    exec(block, scope)
    assert [type(module) for module in scope["model"]] == [nn.Linear, torch.nn.SiLU, torch.nn.Linear]
