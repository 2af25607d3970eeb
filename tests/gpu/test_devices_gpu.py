"""Two devices: a call runs where its tensors are, whichever device is current, and plans refuse tensors of
another device."""

from __future__ import annotations

import re

import pytest
import torch

from gristmill import ops
from gristmill.autotune.metrics import error_of
from gristmill.autotune.resolve import Resolver
from gristmill.autotune.verify import kernel_arguments, run_reference
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.op import layout_for
from gristmill.quant import pack, unpack
from gristmill.quant.packed import LayoutError
from tests.quant.oracle import variants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
REGISTRY = default_registry()
SECOND = "cuda:1"


@pytest.mark.parametrize("op", [op for op in REGISTRY.ops.values() if op.outputs], ids=lambda op: op.name)
def test_a_plan_of_the_second_device_runs_there(op: Op, tmp_path) -> None:
    """The first device stays current; the result on the second device matches the reference."""
    resolver = Resolver(SECOND, Policy(cache=str(tmp_path)))
    for text in op.examples[-3:]:
        problem = op.problem(text)
        torch.cuda.set_device(0)
        selection = resolver.resolve(op, problem)
        assert selection.best is not None, text
        kernel = resolver.kernel(op, selection.best.kernel.name)
        layouts = (
            frozenset({layout_for(kernel, QuantScheme.parse(problem.text("w"))).name})
            if kernel.layouts
            else None
        )
        plan = ops.bind(op.name, op.static(problem), SECOND, resolver.policy, layouts)
        arguments = op.inputs(problem, 7, SECOND)
        packed = kernel_arguments(op, kernel, arguments)
        outputs = [torch.empty(shape, dtype=dtype, device=SECOND) for shape, dtype in op.like(*packed)]
        plan(*packed, *outputs)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(SECOND)
        actual = outputs + [
            a
            for a, p in zip(packed, op.parameters, strict=True)
            if p.mutable and isinstance(a, torch.Tensor) and p.name != "workspace"
        ]
        fresh = op.inputs(problem, 7, SECOND)  # a kernel that adds in place has changed the other inputs
        assert error_of(op, problem, fresh, actual, run_reference(op, fresh)) <= op.tolerance(problem).limit


def test_a_plan_refuses_the_other_device() -> None:
    plan = ops.bind("rms_norm", "n=256,x=bf16", SECOND)
    x, w = (
        torch.randn(4, 256, device="cuda:0", dtype=torch.bfloat16),
        torch.ones(256, device="cuda:0", dtype=torch.bfloat16),
    )
    with pytest.raises(ValueError, match="planned for cuda:1, called with a tensor on cuda:0"):
        plan(x, w, 1e-5, torch.empty_like(x))


LAYOUTS = [layout for layout in REGISTRY.layouts.values() if layout.name not in ("humming_v1", "tinygemm_v1")]
"""Our own layouts; those of other libraries may pack only on a GPU."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_weights_are_packed_on_the_second_device(layout) -> None:
    """Packing works while the first device is current: some torch operators ignore the device of their
    tensors (torch.ldexp does)."""
    torch.cuda.set_device(0)
    for scheme in layout.schemes:
        for q in variants(scheme):
            try:
                on_cpu = pack(q, layout)
            except LayoutError as error:
                with pytest.raises(LayoutError, match=re.escape(str(error).split(", got")[0])):
                    pack(q.to(SECOND), layout)
                continue
            on_second = pack(q.to(SECOND), layout)
            for name, tensor in on_second.slots.items():
                assert torch.equal(tensor.cpu(), on_cpu.slots[name]), f"{scheme}: {name} of {q}"
            assert unpack(on_second).identical(q.to(SECOND)), f"{scheme}: {q}"
            assert torch.equal(q.to(SECOND).dequantize().cpu(), q.dequantize()), f"{scheme}: {q}"
