"""Layers whose weights are dequantized in each call are named when a model is loaded, and in `explain`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import pytest

import gristmill
from gristmill.kernel_registry.registry import default_registry
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams

SLOW = "each call dequantizes the whole weight of "


def test_a_model_names_them_in_one_warning(make: Callable[..., LLM]) -> None:
    with pytest.warns(RuntimeWarning, match=SLOW) as caught:
        llm = make("docs-llama", quant="int3_g64")
    (message,) = [str(w.message) for w in caught if SLOW in str(w.message)]
    layers = llm.config.num_layers
    assert (
        f"docs-llama: {SLOW}{4 * layers} layers of int3_g64 (linear_dequant_torch; faster: quant='fp32' or weights in int4_g"
        in message
    )
    llm.generate([[1, 2]], SamplingParams(max_tokens=2))
    reasons = {row["reason"] for row in llm.explain() if "w=int3_g64" in row["problem"]}
    assert reasons and all(
        "; dequantizes the whole weight in each call; faster: quant='fp32' or" in r for r in reasons
    )
    assert not [
        row for row in llm.explain() if "dequantizes" in row["reason"] and "w=int3_g64" not in row["problem"]
    ]


def test_other_models_say_nothing(make: Callable[..., LLM]) -> None:
    for options in ({}, {"quant": "int4_g32"}, {"quant": "int4_g32", "activations": "int8"}):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", SLOW)
            make("docs-llama", **options)
            make("docs-deepseek", **options)


def test_explain_says_what_is_slow_on_a_device() -> None:
    for problem, target, ways in (
        ("n=4096,k=4096,w=int2_g16_min", "h200", "quant='bf16' or weights in int4_g128"),
        ("n=4096,k=576,w=int6_g16", "gfx942", "quant='bf16' or weights in int4_g64"),
        ("m=1,n=4096,k=4096,w=int8_ch.int8_token", "gfx942", "quant='bf16' or weights in int4_g128"),
        ("n=64,k=64,x=fp32,w=int2_g16_min", "cpu:avx2", "quant='fp32' or weights in int4_g64"),
    ):
        explanation = gristmill.explain("linear", problem, target)
        slow = f"linear_dequant_torch dequantizes the whole weight in each call; faster: {ways}"
        assert explanation.slow == slow == json.loads(json.dumps(explanation.as_dict()))["slow"]
        assert f"Slow with few rows: {slow}" in str(explanation)
    for problem in (
        "n=4096,k=4096,w=int4_g128",
        "n=4096,k=4096,w=int4_g32_min",
        "n=4096,k=4096,w=int8_ch.int8_token",
        "n=64,k=64",
    ):
        explanation = gristmill.explain("linear", problem, "h200")
        assert (
            explanation.slow == ""
            and "Slow" not in str(explanation)
            and explanation.as_dict()["slow"] is None
        )


def test_kernels_that_dequantize_declare_it() -> None:
    """Their names and summaries say what they do; a new one with such a name has to declare it."""
    kernels = [*default_registry().all_kernels()]
    declared = {kernel.name for kernel in kernels if kernel.dequantizes}
    assert {"grouped_linear_torch", "moe_chain_torch"} <= declared
    named = {k.name for k in kernels if "_dequant_" in k.name or "dequantize" in k.summary}
    assert (
        named == {"linear_dequant_torch", "linear_dequant_frag16", "linear_dequant_scales128x4"} <= declared
    )


def test_a_kernel_over_tiles_takes_only_what_the_tiles_hold() -> None:
    """int4_g32_min has the bits of int4_g32, and none of the layouts that it dequantizes stores minimums."""
    kernel, op = default_registry().kernel("linear", "linear_dequant_frag16"), default_registry().op("linear")
    for scheme in ("int4_g32", "int8_ch", "mxfp4", "fp8_block"):
        assert kernel.accepts(op.problem(f"m=1,n=64,k=128,w={scheme}")) is None
    for scheme in ("int4_g32_min", "int4_g128.int8_token", "bf16"):
        assert "not " + scheme in str(kernel.accepts(op.problem(f"m=1,n=64,k=128,w={scheme}")))
