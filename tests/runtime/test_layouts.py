"""A layout that accepts a scheme but not this weight: the layer is packed in another layout, with a warning."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import NoKernelError
from gristmill.quant import quantize
from gristmill.quant.layouts import _cpu_rows16
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans


def test_a_refused_layout_is_left_out_of_the_plan(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    weight = quantize(torch.randn(48, 128), "int4_g128")
    plans = Plans(torch.device("cpu"), torch.float32, policy)
    plain = Linear(plans, weight)
    assert list(plain.weight.packed) == ["cpu_rows16_v1"]

    def refuse(weight: object) -> None:
        raise ValueError("this one does not fit")

    monkeypatch.setattr(_cpu_rows16, "pack", refuse)
    with pytest.warns(RuntimeWarning, match="not packed as cpu_rows16_v1: this one does not fit"):
        other = Linear(plans, weight)
    assert list(other.weight.packed) == ["plain_v1"]
    x = torch.randn(3, 128)
    assert torch.allclose(other(x), x @ weight.dequantize().T, atol=1e-4)
    monkeypatch.setattr("gristmill.quant.layouts._plain.pack", refuse)
    with pytest.warns(RuntimeWarning), pytest.raises(NoKernelError):
        Linear(plans, weight)


def test_layouts_of_libraries_that_are_not_here_are_no_choice(policy: Policy) -> None:
    """humming_v1 is the smallest layout of narrow nvfp4 weights, but without humming no kernel reads it."""
    scheme, n, k = "nvfp4", 4096, 128
    fits = {
        name: layout.nbytes(scheme, n, k)
        for name, layout in default_registry().layouts.items()
        if layout.accepts(scheme)
    }
    assert min(fits, key=lambda name: fits[name]) == "humming_v1"
    layer = Linear(Plans(torch.device("cpu"), torch.float32, policy), quantize(torch.randn(n, k), scheme))
    assert list(layer.weight.packed) == ["cpu_rows16_v1"]
