"""The scheme that weights are loaded in on a GPU, the default device, and the loss beside the CPU's, which multiplies them as stored."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.devices import auto_device
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.tools.evaluate import evaluate
from tests.runtime import oracle
from tests.runtime.oracle import MODELS, NAMES

pytestmark = pytest.mark.gpu


def test_the_default_device_is_this_gpu() -> None:
    device, line = auto_device(Policy.current())
    assert device == torch.device("cuda:0") and line.startswith("cuda:0 (")


@pytest.mark.parametrize(
    ("scheme", "loaded"),
    [("int3_g64", "bf16"), ("int8_g32", "int8_g32"), ("int4_g128.int8_g128", "int4_g128")],
)
@pytest.mark.parametrize("name", NAMES)
def test_no_weight_is_dequantized_in_each_call(
    name: str, scheme: str, loaded: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = oracle.eval_tokens()[:4096]
    with caplog.at_level(logging.INFO, "gristmill"), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*dequantizes the whole weight")
        llm = LLM(MODELS / name, warm="off", dtype="bf16", quant=scheme, num_blocks=256)
    plans = llm.model.plans
    assert isinstance(plans, Plans) and plans.device == torch.device("cuda:0")
    bound = {str(p.static["w"]) for p in plans.bound.values() if p.op.name in ("linear", "moe")}
    assert loaded in bound and bound <= {loaded, "bf16", "fp32"}
    said = [r.getMessage() for r in caplog.records if f"of {scheme} as {loaded}" in r.getMessage()]
    assert len(said) == (scheme != loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        stored = LLM(
            MODELS / name,
            warm="off",
            dtype="bf16",
            quant=scheme.partition(".")[0],
            device="cpu",
            num_blocks=256,
        )
    losses = [evaluate(one.engine, ids, 1024, 4).loss for one in (llm, stored)]
    assert abs(losses[0] - losses[1]) < 0.003, losses
