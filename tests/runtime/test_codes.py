"""Layers that hand codes to the next product: the ids and logits of the model without them, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.scheme import cdiv
from gristmill.quant import quantize
from gristmill.quant.activations import quantize_activation
from gristmill.quant.checkpoints.parts import Part
from gristmill.runtime.layers import norm
from gristmill.runtime.layers.codes import Codes, new_codes
from gristmill.runtime.layers.linear import SplitLinear
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA
from tests.runtime.random_checkpoint import MIXTRAL, Random
from tests.runtime.test_writers import write

CHECKPOINTS = {"int8": ("compressed-tensors", "int8_ch.int8_token"), "fp8": ("fp8", "fp8_block")}
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of our writer with a format of activations."""
    return write(LLAMA, tmp_path_factory.mktemp("codes") / request.param, *CHECKPOINTS[request.param])


def quantizing(llm: LLM) -> set[str]:
    """The operations that made codes, or took them."""
    bound = llm.model.plans.bound.values()
    used = [plan for plan in bound if any(plan.entries)]
    makers = {plan.op.name for plan in used if plan.op.name.endswith("_quant")}
    return makers | {"linear" for plan in used if plan.static.as_dict().get("codes")}


def results(llm: LLM) -> tuple[list[list[int]], torch.Tensor]:
    text = oracle.eval_tokens()
    ids = [list(done.token_ids) for done in llm.generate([text[:20], text[40:47]], GREEDY)]
    return ids, window_logits(llm.engine, text[:24])


@pytest.fixture
def of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats of activations as on a GPU that has kernels for all of them."""
    monkeypatch.setattr(Plans, "compiled", lambda *_: True)


@pytest.mark.usefixtures("of_a_gpu")
@pytest.mark.parametrize("gates_apart", [False, True])
def test_ids_and_logits_are_those_without_codes(
    make: Callable[..., LLM], folder: Path, monkeypatch: pytest.MonkeyPatch, gates_apart: bool
) -> None:
    """silu(gate) · up in a call of its own rounds otherwise than in the epilogue of a product on a CPU, in the last bit of a float32."""
    monkeypatch.setattr(Plans, "gates_apart", gates_apart)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(Plans, "takes_codes", lambda *_: None)
        plain = make(folder)
    coded = make(folder)
    (ids, logits), (expected_ids, expected) = results(coded), results(plain)
    assert ids == expected_ids
    if gates_apart:
        torch.testing.assert_close(logits, expected, rtol=0, atol=0.02 * float(expected.std()))
    else:
        assert torch.equal(logits, expected)
    assert not quantizing(plain)
    makers = {"rms_norm_quant", "silu_and_mul_quant"} if gates_apart else {"rms_norm_quant"}
    assert quantizing(coded) == {"linear", *makers}


def test_by_default_on_a_cpu(make: Callable[..., LLM], folder: Path) -> None:
    """int8 has a kernel that takes codes; e4m3 weights are multiplied with floats."""
    llm = make(folder)
    results(llm)
    assert quantizing(llm) == ({"rms_norm_quant", "linear"} if folder.name == "int8" else set())


@pytest.mark.usefixtures("of_a_gpu")
def test_the_codes_of_another_layer_show(
    make: Callable[..., LLM], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: codes are handed on with the scales of the row before."""
    expected = results(make(folder))[1]

    def late(*rows: torch.Tensor) -> Codes:
        x, codes, scales = rows
        return Codes(x, codes, scales.roll(1, 0))

    monkeypatch.setattr(norm, "Codes", late)
    assert not torch.allclose(results(make(folder))[1], expected, rtol=0, atol=0.05 * float(expected.std()))


@pytest.mark.usefixtures("of_a_gpu")
def test_experts_take_codes_with_their_values(make: Callable[..., LLM]) -> None:
    """Which the router reads: without them it would choose other experts."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    options = {"quant": "fp8_block.fp8_g128", "device": "cpu", "num_blocks": 64}

    def made() -> torch.Tensor:
        return window_logits(LLM(Random("cpu", MIXTRAL, **sizes), **options).engine, list(range(3, 40)))

    with pytest.MonkeyPatch.context() as without:
        without.setattr(Plans, "takes_codes", lambda *_: None)
        expected = made()
    llm = LLM(Random("cpu", MIXTRAL, **sizes), **options)
    assert torch.equal(window_logits(llm.engine, list(range(3, 40))), expected)
    assert any(plan.op.name == "moe" and plan.static["codes"] for plan in llm.model.plans.bound.values())
    for layer in llm.model.layers:  # type: ignore[attr-defined]
        layer.mlp_norm.serve(layer.mlp.takes, keep=False)
    assert not torch.equal(window_logits(llm.engine, list(range(3, 40))), expected)


def test_memory_of_codes() -> None:
    """The scales of a group are one after another, and groups begin at multiples of 16 bytes."""
    for form, groups in (("fp8_token", 1), ("int8_token", 1), ("fp8_g128", 3), ("int8_g32", 10)):
        codes, scales = new_codes(torch.empty(5, 7), 300, form)
        assert codes.shape == (5, 300) and codes.is_contiguous() and scales.shape == (5, groups)
        assert codes.dtype == quantize_activation(torch.ones(1, 300), form).values.dtype
        assert groups == 1 or (scales.stride(0) == 1 and scales.stride(1) % 4 == 0)
        assert groups in (1, cdiv(300, 128), cdiv(300, 32))


def test_a_layer_in_parts_refuses_codes() -> None:
    plans = Plans(torch.device("cpu"), torch.float32)
    split = SplitLinear(plans, [Part(quantize(torch.randn(16, 64), "fp32"))] * 2, target="layers.0.qkv")
    assert split.takes is None
    with pytest.raises(TypeError, match=r"layers\.0\.qkv takes floats, got codes"):
        split(Codes(torch.ones(1, 64), torch.ones(1, 64, dtype=torch.int8), torch.ones(1, 1)))
