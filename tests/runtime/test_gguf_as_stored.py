"""A GGUF file is multiplied as it is stored: by kernels over its own codes, with activations of 8 bits, the head too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.tools.evaluate import evaluate
from tests.runtime import oracle, producers
from tests.runtime.oracle import LLAMA


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_weights_and_head_stay_as_they_are(kind: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path, _ = producers.gguf_file(LLAMA, tmp_path, {"_proj": kind, "embed_tokens": kind})
    llm, floats = make(path), make(path, activations="float")
    plans = llm.model.plans
    assert isinstance(plans, Plans)
    products = [plan for plan in plans.bound.values() if plan.op.name == "linear"]
    assert len(products) == 5  # q, k and v; out; gate and up; down; the head
    for plan in products:
        assert str(plan.static["w"]).endswith(".int8_g32")
        best = plans.resolver.select(plan.op, plan.op.at_bucket(plan.static, 1), plan.layouts).require()
        assert best.kernel.language == "cpp"
    assert llm.weight_bytes <= 1.1 * path.stat().st_size
    ids = oracle.eval_tokens()[:1024]
    losses = [evaluate(one.engine, ids, 256, 4).loss for one in (llm, floats)]
    assert 0 < abs(losses[0] - losses[1]) < 0.01


def test_a_float_scheme_is_one_for_the_head_too(make: Callable[..., LLM], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path, _ = producers.gguf_file(LLAMA, tmp_path, {"_proj": "Q8_0", "embed_tokens": "Q8_0"})
    plans = make(path, quant="fp32").model.plans
    assert isinstance(plans, Plans)
    assert {plan.static["w"] for plan in plans.bound.values() if plan.op.name == "linear"} == {"fp32"}
