"""Weights that no kernel of a GPU multiplies as they are stored are loaded in a scheme that one does. GPUs are described, not here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.quant import QuantTensor, quantize
from gristmill.quant.checkpoints.parts import Part
from gristmill.runtime.layers import linear
from gristmill.runtime.layers.linear import SplitLinear
from gristmill.runtime.layers.loaded_schemes import LoadedSchemes, in_scheme
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader import load
from gristmill.runtime.parallel.mesh import ALONE
from gristmill.runtime.weight_update import build_like
from gristmill.tools.evaluate import evaluate
from tests.runtime import oracle, producers
from tests.runtime.oracle import LLAMA

ROOM = 1 << 30
BUILD = replace(
    Build.probe(),
    cuda_archs=("sm_90a", "compute_75", "compute_80", "compute_89", "compute_120f"),
    left_out=(),
    triton_interpreter=False,
)
"""This installation with every library of CUDA kernels; Triton compiles, so that its kernels run where they have the hardware."""


def plans_of(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    room: int = ROOM,
    dtype: torch.dtype = torch.bfloat16,
    build: Build = BUILD,
    **policy: object,
) -> Plans:
    """Plans of a device that this machine need not have, as selection sees it."""
    here = Policy(cache=str(tmp_path), **policy)  # type: ignore[arg-type]
    kind = "cpu" if name.startswith("cpu") else "cuda"
    monkeypatch.setattr(Plans, "resolver", Resolver(kind, here, build=build, target=Target.parse(name)))
    plans = Plans(torch.device(kind), dtype, here)
    plans.schemes = LoadedSchemes(room)
    return plans


def weight_of(scheme: str, n: int = 96, k: int = 256) -> QuantTensor:
    return quantize(torch.randn(n, k), scheme)


@pytest.mark.parametrize(
    ("target", "scheme", "loaded"),
    [
        ("h200", "int4_g32", "int4_g32"),  # Q4_0
        ("h200", "int4_g32_min", "int4_g32_min"),  # Q4_1, Q4_K
        ("h200", "int6_g16", "int6_g16"),  # Q6_K
        ("h200", "int2_g16_min", "bf16"),  # Q2_K
        ("sm_80", "int5_g32", "int5_g32"),  # Q5_0
        ("sm_120", "int5_g32_min.int8_g32", "int5_g32_min"),  # Q5_1, Q5_K as the file declares them
        ("sm_75", "int4_g32_min", "bf16"),
        ("gfx942", "int6_g16", "bf16"),
        ("h200", "int8_g32", "int8_g32"),  # Q8_0
        ("sm_86", "int8_g32", "int8_g32"),
        ("gfx942", "int8_g64", "int8_g64"),
        ("sm_86", "int8_g16", "bf16"),
        ("sm_86", "int3_g64", "bf16"),
        ("gfx942", "int5_g32_min", "bf16"),
        ("h200", "int8_ch.int8_token", "int8_ch.int8_token"),
        ("sm_86", "int8_ch.int8_token", "int8_ch.int8_token"),
        ("sm_75", "int8_ch.int8_token", "int8_ch.int8_token"),
        ("sm_86", "fp8_block.fp8_g128", "fp8_block"),
        ("sm_89", "fp8_block.fp8_g128", "fp8_block.fp8_g128"),
        ("sm_89", "fp8_ch.fp8_token", "fp8_ch.fp8_token"),
        ("sm_120", "fp8.fp8", "fp8.fp8"),
        ("sm_121", "fp8.fp8_token", "fp8.fp8_token"),
        ("sm_100", "fp8_block.fp8_g128", "fp8_block.fp8_g128"),
        ("h200", "fp8_block.fp8_g128", "fp8_block.fp8_g128"),
        ("h200", "int4_g128.int8_g128", "int4_g128"),
        ("sm_86", "int6_g16.int8_g32", "int6_g16"),
        ("sm_86", "bf16", "bf16"),
        ("cpu:avx2", "int4_g32_min", "int4_g32_min"),
        ("cpu:avx2", "int3_g64", "int3_g64"),
        ("cpu:avx2", "int8_ch.int8_token", "int8_ch.int8_token"),
    ],
)
def test_the_scheme_that_a_device_has_a_kernel_for(
    target: str, scheme: str, loaded: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans, weight = plans_of(target, monkeypatch, tmp_path), weight_of(scheme)
    made = plans.loaded(weight)
    assert str(made.scheme) == loaded
    if loaded == "bf16":
        assert torch.equal(made.dense(), weight.dequantize("bf16"))
        assert plans.schemes.grown == (made.nbytes - weight.nbytes if scheme != "bf16" else 0)
    else:
        assert made.codes is weight.codes
    assert plans.loaded(made).identical(made)
    changed = f"loaded 1 layers of {scheme} as {loaded}" if scheme != loaded else ""
    assert plans.schemes.line("cuda:0").startswith(changed) and bool(changed) == bool(
        plans.schemes.line("cuda:0")
    )


@pytest.mark.parametrize(
    ("target", "stored", "declared", "loaded"),
    [
        ("sm_120", "nvfp4", "nvfp4", "nvfp4.nvfp4"),  # W4A4 of compressed-tensors and ModelOpt
        ("sm_121", "mxfp4", "mxfp4", "mxfp4.mxfp4"),
        ("sm_120", "mxfp8", "mxfp8", "mxfp8.mxfp8"),
        ("sm_120", "nvfp4", None, "nvfp4"),  # W4A16
        ("sm_89", "fp8_block", "fp8_g128", "fp8_block.fp8_g128"),  # DeepSeek's
        ("sm_120", "fp8_ch", "fp8_token", "fp8_ch.fp8_token"),  # W8A8 of compressed-tensors
        ("sm_121", "fp8", "fp8", "fp8.fp8"),
        ("sm_86", "fp8_block", "fp8_g128", "fp8_block"),
        ("sm_75", "int8_ch", "int8_token", "int8_ch.int8_token"),
        ("sm_70", "int8_ch", "int8_token", "int8_ch"),
        ("sm_120", "mxfp4", "mxfp8", "mxfp4.mxfp8"),  # by Triton
        ("sm_100", "nvfp4", "nvfp4", "nvfp4.nvfp4"),
        ("sm_100", "nvfp4", "mxfp8", "nvfp4"),  # no kernel multiplies these
        ("h200", "nvfp4", "nvfp4", "nvfp4"),
    ],
)
def test_declared_blocks_of_activations_where_a_kernel_multiplies_them(
    target: str,
    stored: str,
    declared: str | None,
    loaded: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    plans = plans_of(target, monkeypatch, tmp_path)
    assert str(plans.loaded(weight_of(stored), declared).scheme) == loaded
    monkeypatch.setattr(plans, "policy", replace(plans.policy, activations="float"))
    assert str(plans.loaded(weight_of(stored), declared).scheme) == stored


@pytest.mark.parametrize(
    ("target", "scheme", "loaded"),
    [("sm_75", "int8_ch.int8_token", "int8_ch"), ("sm_89", "fp8_block.fp8_g128", "fp8_block")],
)
def test_a_build_without_the_library_leaves_activations_in_floats(
    target: str, scheme: str, loaded: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build = replace(BUILD, cuda_archs=("sm_90a", "compute_80"), left_out=("compute_75", "compute_89"))
    made = plans_of(target, monkeypatch, tmp_path, build=build).loaded(weight_of(scheme))
    assert str(made.scheme) == loaded


def test_what_does_not_fit_stays_as_it_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weight = weight_of("int2_g16_min")
    growth = 2 * weight.n * weight.k - weight.nbytes
    plans = plans_of("h200", monkeypatch, tmp_path, room=2 * growth + 1)
    assert [str(plans.loaded(weight).scheme) for _ in range(3)] == ["bf16", "bf16", "int2_g16_min"]
    assert plans.schemes.grown == 2 * growth


def test_a_policy_that_pins_a_kernel_gets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans = plans_of("h200", monkeypatch, tmp_path, pins={"linear": ("linear_dequant_torch",)})
    assert str(plans.loaded(weight_of("int2_g16_min")).scheme) == "int2_g16_min"


def test_act_order_and_the_dtype_of_x(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPTQ's 3 bits in any order; float32 activations get float32 weights, which nothing rounds."""
    order = torch.randperm(256).to(torch.int32) // 64
    plain = weight_of("int3_g64")
    weight = QuantTensor(plain.codes, plain.scales, plain.shape, plain.scheme, g_idx=order)
    made = plans_of("h200", monkeypatch, tmp_path, dtype=torch.float32).loaded(weight)
    assert (
        str(made.scheme) == "fp32" and made.g_idx is None and torch.equal(made.dense(), weight.dequantize())
    )


def test_parts_that_become_dense_are_one_matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans = plans_of("h200", monkeypatch, tmp_path)
    parts = [Part(weight_of("int2_g16_min")), Part(weight_of("int3_g16", 32), None, "int8_g32")]
    (joined,) = linear._loaded(plans, parts)
    assert joined.weight.shape == (128, 256)
    assert torch.equal(joined.weight.dense(), torch.cat([p.weight.dequantize("bf16") for p in parts]))
    mixed = linear._loaded(plans, [parts[0], Part(weight_of("int4_g32", 32), None, "int8_g32")])
    assert [str(part.weight.scheme) for part in mixed] == ["bf16", "int4_g32"]


def test_experts_of_two_schemes_become_alike() -> None:
    """Files of K-quants store down in more bits than gate and up."""
    up, down = weight_of("int4_g32_min"), weight_of("int6_g16.int8_g32")
    dense = QuantScheme.parse("bf16")
    assert torch.equal(in_scheme(up, dense).dense(), up.dequantize("bf16"))
    assert torch.equal(in_scheme(down, dense).dense(), down.dequantize("bf16"))
    assert (
        str(in_scheme(up, down.scheme).scheme) == "int4_g32_min.int8_g32" and in_scheme(up, up.scheme) is up
    )


def test_experts_are_dequantized_at_load_too(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this CPU, under the rule of GPUs."""
    with pytest.warns(RuntimeWarning, match="moe_chain_torch"):
        stored = make("docs-deepseek", quant="int3_g64")
    monkeypatch.setattr(LoadedSchemes, "keeps_stored", staticmethod(lambda resolver: False))
    monkeypatch.setattr(load, "room_of_weights", lambda *_: ROOM)
    llm = make("docs-deepseek", quant="int3_g64")
    assert {str(plan.static["w"]) for plan in llm.model.plans.bound.values() if plan.op.name == "moe"} == {
        "fp32"
    }
    ids = oracle.eval_tokens()[:256]
    losses = [evaluate(one.engine, ids, 128, 2).loss for one in (stored, llm)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_the_room_of_weights_is_what_memory_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load.open_checkpoint(oracle.MODELS / LLAMA)
    stored = sum(path.stat().st_size for path in (oracle.MODELS / LLAMA).glob("*.safetensors"))
    monkeypatch.setattr(load, "free_bytes", lambda device: {"cuda:1": 1 << 30}[device])
    room = load.room_of_weights(checkpoint, torch.device("cuda:1"), ALONE)
    assert 0 < 0.75 * (1 << 30) - room <= stored < 0.75 * (1 << 30) - room + 65536
    monkeypatch.setattr(load, "free_bytes", lambda device: 1 << 10)
    assert load.room_of_weights(checkpoint, torch.device("cuda:0"), ALONE) == 0
    assert load.room_of_weights(checkpoint, torch.device("cpu"), ALONE) == 0


def test_a_model_of_a_gguf_file(
    make: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On this CPU, under the rule of GPUs: fused, with the numbers of the file, said in a line, and the same again in an update."""
    pytest.importorskip("gguf")
    path, _ = producers.gguf_file(LLAMA, tmp_path, {"v_proj": "Q5_1", "_proj": "Q4_1"})
    with pytest.warns(RuntimeWarning, match="dequantizes the whole weight"):
        stored = make(path, activations="float")
    assert isinstance(stored.model.layers[0].attention.qkv, SplitLinear)
    monkeypatch.setattr(LoadedSchemes, "keeps_stored", staticmethod(lambda resolver: False))
    monkeypatch.setattr(load, "room_of_weights", lambda *_: ROOM)
    with caplog.at_level(logging.INFO, "gristmill"):
        llm = make(path, activations="float")
    line = next(r.getMessage() for r in caplog.records if "loaded" in r.getMessage())
    layers = llm.config.num_layers
    assert (
        f"{path}: loaded {5 * layers} layers of int4_g32_min as fp32, {layers} layers of int5_g32_min as fp32, in 0."
        in line
    )
    assert not isinstance(llm.model.layers[0].attention.qkv, SplitLinear)
    assert {str(plan.static["w"]) for plan in llm.model.plans.bound.values() if plan.op.name == "linear"} == {
        "fp32"
    }
    ids = oracle.eval_tokens()[:512]
    losses = [evaluate(one.engine, ids, 256, 2).loss for one in (stored, llm)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    again = build_like(llm.model, path, None, None)
    assert again.plans.schemes.grown == llm.model.plans.schemes.grown > 0
