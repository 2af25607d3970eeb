"""linear_fp32 on a GPU: every configuration, errors beside those of torch's product in float32, bits that repeat, a captured graph, one launch."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.device import device_target
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from tests.calls import make_call
from tests.conftest import HAS_GPU

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
DEVICE = "cuda:0"
REGISTRY = default_registry()
OP = REGISTRY.op("linear_fp32")
KERNEL, INVARIANT = (
    REGISTRY.kernel("linear_fp32", f"linear_fp32_{name}") for name in ("triton", "invariant_triton")
)
SHAPES = (
    "m=1,n=256,k=7168",
    "m=16,n=128,k=2048",
    "m=64,n=8,k=4096",
    "m=1000,n=256,k=7168",
    "m=5,n=1,k=2048,bias=true",
)


@pytest.mark.parametrize("text", [*OP.examples, *SHAPES, "m=16,n=64,k=2880,w=fp32,bias=true"], ids=str)
def test_every_configuration(text: str) -> None:
    assert KERNEL.space is not None
    target, problem = device_target(DEVICE, Policy()), OP.problem(text)
    for kernel, configs in (
        (KERNEL, [*KERNEL.space(problem, target)]),
        (INVARIANT, [INVARIANT.config(problem, target)]),
    ):
        for config in configs:
            result = verify(OP, kernel, config, problem, DEVICE)
            assert result.ok, f"{kernel.name} {config}: {result.reason}"


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_as_exact_as_products_of_float32(m: int, dtype: torch.dtype) -> None:
    """RMS error against float64, beside that of x.float() @ w.float().T without TF32; sums of one sign, which rounding towards zero makes smaller."""
    generator = torch.Generator(DEVICE).manual_seed(m)
    x, w = (torch.randn(rows, 7168, device=DEVICE, generator=generator).to(dtype) for rows in (m, 256))
    for a, b in ((x, w), (x.abs(), w.abs())):
        exact = a.double() @ b.double().T
        size = exact.square().mean().sqrt()
        config = KERNEL.config(OP.problem(f"m={m},n=256,k=7168"), device_target(DEVICE, Policy()))
        out = torch.empty(m, 256, device=DEVICE)
        load(KERNEL)(config, make_call("linear_fp32", x=a, weight=b, out=out))
        errors = [
            float((y.double() - exact).square().mean().sqrt() / size) for y in (out, a.float() @ b.float().T)
        ]
        # A tensor core cuts off what it adds: at most some 3e-7 of the sum of a step, of which float32 keeps 6e-8.
        assert errors[0] <= 2 * errors[1] + 5e-7, errors


def test_bits_repeat_in_a_graph_of_calls_of_two_sizes() -> None:
    """One workspace, whose counters every call leaves at zero."""
    target = device_target(DEVICE, Policy())
    calls = []
    problems = [OP.problem(f"m={m},n=256,k=7168") for m in (16, 3)]
    size = max(KERNEL.workspace(p, KERNEL.config(p, target)).bytes for p in problems)
    workspace = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for problem in problems:
        x, w = (
            torch.randn(rows, 7168, device=DEVICE, generator=generator).bfloat16()
            for rows in (problem.integer("m"), 256)
        )
        out = torch.empty(len(x), 256, device=DEVICE)
        call = make_call("linear_fp32", x=x, weight=w, workspace=workspace, out=out)
        calls.append((KERNEL.config(problem, target), call, x.float() @ w.float().T))
    launch = load(KERNEL)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for config, call, _ in calls:
            launch(config, call)
    stream.synchronize()
    first = [call.out.clone() for _, call, _ in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), capturing(graph, stream=stream):
        for config, call, _ in calls:
            launch(config, call)
    for _ in range(50):
        for _, call, _ in calls:
            call.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for (_, call, expected), before in zip(calls, first, strict=True):
            assert torch.equal(call.out, before)
            torch.testing.assert_close(call.out, expected, rtol=1e-4, atol=1e-3)


def test_rows_have_the_same_bits_in_every_batch() -> None:
    target, generator = device_target(DEVICE, Policy()), torch.Generator(DEVICE).manual_seed(2)
    x, w = (torch.randn(rows, 2048, device=DEVICE, generator=generator).bfloat16() for rows in (300, 128))
    results = []
    for m in (300, 1, 17):
        out = torch.empty(m, 128, device=DEVICE)
        config = INVARIANT.config(OP.problem(f"m={m},n=128,k=2048"), target)
        load(INVARIANT)(config, make_call("linear_fp32", x=x[:m], weight=w, out=out))
        results.append(out)
    assert torch.equal(results[0][:17], results[2]) and torch.equal(results[0][:1], results[1])
