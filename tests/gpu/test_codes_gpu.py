"""Codes that the layer before has made, on Hopper: products to the bit, and a model's ids and logits, with fewer launches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.autotune.device import device_target
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.given_codes import codes_of
from gristmill.kernels.load import load
from gristmill.quant import pack, quantize
from gristmill.runtime.layers.codes import new_codes
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import window_logits
from tests.conftest import HAS_GPU
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA
from tests.runtime.test_writers import write

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
OP = default_registry().op("linear")


@pytest.mark.parametrize("name", ["linear_w8a8_sm90", "linear_scaled_mm_torch"])
@pytest.mark.parametrize("scheme", ["fp8_ch.fp8_token", "fp8.fp8_token", "fp8_block.fp8_g128"])
@pytest.mark.parametrize("m", [1, 7, 64, 257, 1000])
def test_products_are_those_of_x(name: str, scheme: str, m: int) -> None:
    """With scales as the runtime lays them out, by row, and with a gate. The values of x are not read."""
    kernel, (n, k) = default_registry().kernel("linear", name), (512, 656)
    if kernel.accepts(OP.problem(f"m={m},n={n},k={k},w={scheme},codes=true")) is not None:
        return
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(m, k, device="cuda", generator=generator).bfloat16()
    x *= torch.randn(m, 1, device="cuda", generator=generator).exp()
    weight = quantize(torch.randn(n, k, device="cuda", generator=generator), scheme)
    tensors, form = pack(weight, "plain_v1").tensors, scheme.partition(".")[2]
    codes, by_row = codes_of(x, form)
    laid_out = new_codes(x, k, form)[1].copy_(by_row)
    for gated in (False, True):
        text = f"m={m},n={n},k={k},w={scheme},epilogue={'silu_mul' if gated else 'none'}"
        config = kernel.config(OP.problem(text), device_target("cuda", Policy())) if kernel.config else {}
        outs = []
        for given in ((None, None), (codes, laid_out), (codes, by_row)):
            out = torch.full((m, n // (1 + gated)), float("nan"), device="cuda", dtype=torch.bfloat16)
            source = x if given[0] is None else torch.full_like(x, float("nan"))
            load(kernel)(config, OP.Call(source, tensors, None, None, gated, n, None, *given, out))
            outs.append(out)
        assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("scheme", ["fp8_ch.fp8_token", "fp8_block.fp8_g128"])
@pytest.mark.parametrize("m", [1, 7, 70, 300])
def test_experts_are_those_of_x(scheme: str, m: int) -> None:
    """Copied to their experts, an expert without tokens and ids of other ranks among them. The values of x are not read."""
    op, kernel = default_registry().op("moe"), default_registry().kernel("moe", "moe_w8a8_sm90")
    problem = op.problem(f"m={m},top_k=3,e=5,h=272,i=384,w={scheme}")
    x, weights, ids, w13, w2, inner, *rest = op.inputs(problem, 0, "cuda")
    packed = [pack(weight, "plain_v1").tensors for weight in (w13, w2)]
    codes, by_row = codes_of(x, scheme.partition(".")[2])
    laid_out = new_codes(x, 272, scheme.partition(".")[2])[1].copy_(by_row)
    config = kernel.config(problem, device_target("cuda", Policy()))
    outs = []
    for given in ((None, None), (codes, laid_out), (codes, by_row)):
        out = torch.full_like(x, float("nan"))
        source = x if given[0] is None else torch.full_like(x, float("nan"))
        load(kernel)(
            config, op.Call(source, weights, ids, *packed, inner, *rest[:-4], *given, *rest[-2:], out)
        )
        outs.append(out)
    assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_a_model_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and logits are those without codes; the norm, the gate and the products of a layer are seven operations, with no quantizer."""
    folder, text = write(LLAMA, tmp_path / "fp8", "fp8", "fp8_block"), oracle.eval_tokens()
    options = {"dtype": "bf16", "device": "cuda", "num_blocks": 256}
    with pytest.MonkeyPatch.context() as without:
        without.setattr(Plans, "takes_codes", lambda *_: None)
        plain = LLM(folder, **options)
    coded = LLM(folder, **options)
    logits, expected = (window_logits(llm.engine, text[:200]) for llm in (coded, plain))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [text[:40], text[100:163], text[:7]]
    made = {plan.op.name for plan in coded.model.plans.bound.values() if any(plan.entries)}
    assert {"rms_norm_quant", "silu_and_mul_quant"} <= made
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.05 * float(expected.std()))
    same = [
        a.token_ids == b.token_ids
        for a, b in zip(coded.generate(prompts, params), plain.generate(prompts, params), strict=True)
    ]
    assert sum(same) >= 2  # kernels chosen for codes may sum in another order
