"""Activation formats that a checkpoint declares: where layers multiply in them, and where activations keep their dtype."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.native import library_dir
from gristmill.quant import QuantTensor, Tensors, open_format, quantize
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.layers.plans import Plans

needs_library = pytest.mark.skipif(
    not (library_dir() / "libgristmill_cuda_sm90a.so").is_file(),
    reason="the CUDA library is not built: needs nvcc",
)


def plans_on(name: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16) -> Plans:
    """Plans of a device that this machine need not have, as selection sees it."""
    resolver = SimpleNamespace(target=Target.parse(name), build=Build.probe(), registry=default_registry())
    monkeypatch.setattr(Plans, "resolver", resolver)
    return Plans(torch.device("cpu" if name.startswith("cpu") else "cuda"), dtype, Policy())


def weight_of(scheme: str, n: int = 96, k: int = 272) -> QuantTensor:
    return quantize(torch.randn(n, k), scheme)


@needs_library
@pytest.mark.parametrize(
    ("scheme", "declared", "multiplied"),
    [
        ("fp8_block", "fp8_g128", True),
        ("fp8_ch", "fp8_token", True),
        ("fp8", "fp8_token", True),
        ("int8_ch", "int8_token", True),
        ("fp8", "fp8", True),
        ("int8_ch", "int8 by token, asymmetric", False),
        ("fp8_ch", None, False),
        ("int4_g16", "int8_token", False),
    ],
)
def test_a_hopper_multiplies_in_the_declared_format_that_it_has_a_kernel_for(
    scheme: str, declared: str | None, multiplied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weight_of(scheme)
    made = plans_on("h200", monkeypatch).with_activations(weight, declared)
    assert str(made.scheme) == (f"{scheme}.{declared}" if multiplied else scheme)
    assert made.codes is weight.codes


@needs_library
def test_other_devices_dtypes_and_shapes_keep_activations_in_their_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = weight_of("fp8_block")
    for name in ("cpu:avx2", "sm_80", "sm_86"):
        assert plans_on(name, monkeypatch).with_activations(weight, "fp8_g128") is weight
    assert plans_on("h200", monkeypatch, torch.float32).with_activations(weight, "fp8_g128") is weight
    odd = weight_of("fp8_block", k=264)
    assert plans_on("h200", monkeypatch).with_activations(odd, "fp8_g128") is odd


def parts(scheme: QuantScheme | None, *, second: bool = True) -> list[str | None]:
    """The declared formats of the parts of gate and up, of which the second may be stored in floats."""
    codes = torch.zeros(128, 256, dtype=torch.float8_e4m3fn)
    tensors = {"gate.weight": codes, "gate.weight_scale_inv": torch.ones(1, 2)}
    if second:
        tensors |= {"up.weight": codes.clone(), "up.weight_scale_inv": torch.ones(1, 2)}
    else:
        tensors["up.weight"] = torch.zeros(128, 256, dtype=torch.bfloat16)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if not second:
        config["modules_to_not_convert"] = ["up"]
    table = WeightTable((Weight("gate_up", ("gate", "up"), (128, 128), 256, "linear"),))
    source = Tensors(tensors)
    source.path = "a checkpoint"  # what errors name
    weights = Weights(source, table, torch.bfloat16, torch.device("cpu"), scheme, open_format(config))
    return [part.declared for part in weights.parts("gate_up")]


def test_the_loader_passes_on_what_the_checkpoint_declares() -> None:
    assert parts(None) == ["fp8_g128"]
    assert parts(None, second=False) == ["fp8_g128", None]


def test_a_requested_scheme_overrides_what_is_declared() -> None:
    assert parts(QuantScheme.parse("fp8_block")) == [None]
    assert parts(QuantScheme.parse("bf16")) == [None]


def experts_on(
    name: str, monkeypatch: pytest.MonkeyPatch, scheme: str, declared: str | None, **axes: object
) -> str:
    """The scheme in which a device multiplies experts that are stored in `scheme`."""
    made = plans_on(name, monkeypatch)
    sizes = {"top_k": 2, "e": 4, "h": 256, "i": 208, "x": "bf16", "w": scheme, **axes}
    return made.declared_experts(made.problem("moe", **sizes), declared).text("w")


@needs_library
@pytest.mark.parametrize(
    ("scheme", "declared", "multiplied"),
    [
        ("fp8_block", "fp8_g128", True),
        ("fp8_ch", "fp8_token", True),
        ("fp8", "fp8_token", True),
        ("fp8", "fp8", False),  # one scale for all tokens
        ("int8_ch", "int8_token", False),
        ("fp8_block", None, False),
        ("bf16", "fp8_token", False),
    ],
)
def test_experts_are_multiplied_in_the_declared_format_that_has_a_kernel(
    scheme: str, declared: str | None, multiplied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert experts_on("h200", monkeypatch, scheme, declared) == (
        f"{scheme}.{declared}" if multiplied else scheme
    )


@needs_library
def test_experts_of_other_devices_and_shapes_keep_activations_in_their_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cpu:avx2", "sm_80", "sm_86"):
        assert experts_on(name, monkeypatch, "fp8_block", "fp8_g128") == "fp8_block"
    assert experts_on("h200", monkeypatch, "int8_ch", "int8_token", i=200) == "int8_ch"


def test_experts_in_fp8_of_any_shape_have_a_kernel_where_triton_multiplies_e4m3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("sm_89", "h200", "sm_100", "sm_120"):
        for axes in ({"i": 200}, {"epilogue": "w2_bias"}, {"activation": "relu2", "gated": False}):
            assert experts_on(name, monkeypatch, "fp8_block", "fp8_g128", **axes) == "fp8_block.fp8_g128"


@pytest.mark.skipif(
    not (library_dir() / "libgristmill_cuda_compute120f.so").is_file(),
    reason="not in this build: needs nvcc and GRISTMILL_RARE=on",
)
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "mxfp8"])
def test_experts_of_a_blackwell_are_multiplied_in_blocks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert experts_on("sm_120", monkeypatch, form, form, i=384) == f"{form}.{form}"
    assert experts_on("sm_120", monkeypatch, form, form, i=200) == form
    assert experts_on("sm_90", monkeypatch, form, form, i=384) == form
    plans = plans_on("sm_120", monkeypatch)
    problem = plans.problem("moe", top_k=2, e=4, h=256, i=384, w=f"{form}.{form}")
    assert plans.takes_codes(problem) is None, "no layer before quantizes in blocks"


def test_experts_declare_a_format_if_all_of_them_do() -> None:
    def declared(floats: str) -> str | None:
        tensors, parts = {}, ("gate", "up")
        for e in range(2):
            for part in parts:
                name = f"experts.{e}.{part}"
                tensors[f"{name}.weight"] = torch.zeros(128, 256, dtype=torch.float8_e4m3fn)
                tensors[f"{name}.weight_scale"] = torch.ones(128, 1)
        groups = {
            "all": {"targets": ["Linear"], "weights": CHANNELS, "input_activations": TOKENS},
            "some": {"targets": [floats], "weights": CHANNELS},
        }
        config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
        sources = tuple(f"experts.{{expert}}.{part}" for part in parts)
        table = WeightTable((Weight("gate_up", sources, (128, 128), 256, "linear", experts=2),))
        source = Tensors(tensors)
        source.path = "a checkpoint"
        weights = Weights(source, table, torch.bfloat16, torch.device("cpu"), None, open_format(config))
        return weights.linear_part("gate_up").declared

    assert declared("no such module") == "fp8_token"
    assert declared("re:.*experts.1.up") is None


CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
