"""Every kernel that can run on this GPU: correct on every example, under CUDA graphs and on a side stream,
and repeatable."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.device import device_target
from gristmill.autotune.metrics import error_of
from gristmill.autotune.resolve import confirmed_build
from gristmill.autotune.verify import kernel_arguments, run_reference, verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from tests.calls import make_call
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.gpu
REGISTRY = default_registry()
DEVICE = "cuda:0"
TARGET = device_target(DEVICE, Policy()) if HAS_GPU else None
# Pinning every kernel imports and queries the wrapped libraries whose sources do not show what they offer.
BUILD = confirmed_build(REGISTRY, TARGET, Policy(pins={"*": ("*",)})) if TARGET is not None else None


def _kernels() -> list[tuple[Op, Kernel]]:
    if TARGET is None or BUILD is None:
        return []
    return [
        (REGISTRY.op(k.op), k)
        for k in REGISTRY.all_kernels()
        if not k.requires.check_hardware(TARGET, BUILD) and not k.requires.check_build(TARGET, BUILD)
    ]


def _rows() -> list[object]:
    return [
        pytest.param(op, kernel, text, id=f"{kernel.name}-{text}")
        for op, kernel in _kernels()
        for text in _alone(op, kernel)
    ]


def _alone(op: Op, kernel: Kernel) -> list[str]:
    """Returns the problems of one process; tests/gpu/test_collectives_gpu.py has those of two."""
    return [text for text in op.test_problems(kernel) if op.world(op.problem(text)) == 1]


def _largest(op: Op, kernel: Kernel) -> str | None:
    return max(_alone(op, kernel), key=lambda text: op.cost(op.problem(text)).bytes, default=None)


def _once() -> list[object]:
    return [
        pytest.param(op, kernel, text, id=kernel.name)
        for op, kernel in _kernels()
        if (text := _largest(op, kernel))
    ]


@pytest.mark.parametrize(("op", "kernel", "text"), _rows())
def test_kernel_matches_reference(op: Op, kernel: Kernel, text: str) -> None:
    problem = op.problem(text)
    outcome = verify(op, kernel, kernel.config(problem, TARGET), problem, DEVICE)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(("op", "kernel", "text"), _rows())
def test_kernel_is_right_in_a_cuda_graph_and_on_a_side_stream(op: Op, kernel: Kernel, text: str) -> None:
    """A call captured on a side stream and replayed on fresh poisoned outputs gives the result of the
    reference."""
    if not kernel.capturable:
        pytest.skip("declares that a CUDA graph cannot hold it")
    problem = op.problem(text)
    arguments = op.inputs(problem, 3, DEVICE)
    reference = run_reference(op, arguments)
    config, launcher = kernel.config(problem, TARGET), load(kernel)
    packed = [
        a.clone() if p.mutable and isinstance(a, torch.Tensor) else a
        for p, a in zip(op.parameters, kernel_arguments(op, kernel, arguments), strict=True)
    ]
    pristine = [a.clone() if isinstance(a, torch.Tensor) else a for a in packed]
    outputs = (
        [torch.empty(shape, dtype=dtype, device=DEVICE) for shape, dtype in op.like(*packed)]
        if op.outputs
        else []
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launcher(config, make_call(op.name, *packed, *outputs))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=stream):
            launcher(config, make_call(op.name, *packed, *outputs))
        for now, before, parameter in zip(packed, pristine, op.parameters, strict=True):
            if parameter.mutable and isinstance(now, torch.Tensor):
                now.copy_(before)
        for out in outputs:
            out.fill_(float("nan") if out.is_floating_point() else -1)
        graph.replay()
    stream.synchronize()
    actual = outputs + [
        a
        for a, p in zip(packed, op.parameters, strict=True)
        if p.mutable and isinstance(a, torch.Tensor) and p.name != "workspace"
    ]
    assert error_of(op, problem, arguments, actual, reference) <= op.tolerance(problem).limit


@pytest.mark.parametrize(("op", "kernel", "text"), _once())
def test_a_kernel_that_says_so_is_deterministic(op: Op, kernel: Kernel, text: str) -> None:
    if not kernel.deterministic or not op.outputs:
        pytest.skip("declares no determinism, or has no outputs of its own")
    problem = op.problem(text)
    arguments = kernel_arguments(op, kernel, op.inputs(problem, 5, DEVICE))
    config, launcher, first = kernel.config(problem, TARGET), load(kernel), None
    for _ in range(20):
        copies = [
            a.clone() if p.mutable and isinstance(a, torch.Tensor) else a
            for p, a in zip(op.parameters, arguments, strict=True)
        ]
        outputs = [torch.empty(shape, dtype=dtype, device=DEVICE) for shape, dtype in op.like(*copies)]
        launcher(config, make_call(op.name, *copies, *outputs))
        torch.cuda.synchronize()
        current = [out.view(torch.uint8).clone() if out.numel() else out for out in outputs]
        assert first is None or all(torch.equal(a, b) for a, b in zip(first, current, strict=True))
        first = current
