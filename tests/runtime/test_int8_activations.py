"""The policy's `activations`: which scheme a layer's product has, and that it is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernels.linear.op import OP
from gristmill.quant import quantize
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans


def plans_of(tmp_path: Path, activations: str | None, device: str = "cpu") -> Plans:
    policy = Policy(
        activations=activations,
        store=str(tmp_path / "store.json"),
        pins={"linear": ("linear_*cpu",)},
        strict=True,
    )
    return Plans(torch.device(device), torch.float32, policy)


@pytest.mark.parametrize("activations, scheme", [("int8", "int4_g64_zp.int8_g32"), (None, "int4_g64_zp")])
def test_a_layer_multiplies_in_the_scheme_of_the_policy(
    activations: str | None, scheme: str, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(48, 192, generator=generator), "int4_g64_zp")
    x = torch.randn(5, 192, generator=generator)
    layer = Linear(plans_of(tmp_path, activations), weight)
    assert str(layer.weight.scheme) == scheme
    both = [OP.reference(x, replace(weight, scheme=s)) for s in (weight.scheme, layer.weight.scheme)]
    out = layer(x)
    torch.testing.assert_close(out, both[1], rtol=1e-5, atol=1e-4)
    assert torch.allclose(out, both[0], rtol=1e-5, atol=1e-4) == (activations is None)


def test_other_weights_and_devices_stay_as_they_are(tmp_path: Path) -> None:
    floats = quantize(torch.randn(48, 192), "fp8_ch")
    integer = quantize(torch.randn(48, 192), "int8_ch")
    on_cpu, on_gpu = plans_of(tmp_path, "int8"), plans_of(tmp_path, "int8", "meta")
    assert on_cpu.with_activations(floats).scheme == floats.scheme
    assert on_gpu.with_activations(integer).scheme == integer.scheme
    assert str(on_cpu.with_activations(integer).scheme) == "int8_ch.int8_g128"
