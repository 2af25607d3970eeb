"""Linear with K split over programs and sums by atomic additions: any number of parts, a restored workspace,
clear refusals."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import select
from gristmill.kernel_registry.store import Store
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear import w_triton_atomic as spec
from gristmill.kernels.load import load
from gristmill.quant import pack, quantize

OP = default_registry().op("linear")
TARGET, HOPPER = Target.parse("cpu:base"), Target.parse("sm_90")


def run(
    m: int, n: int, k: int, scheme: str, split: int, workspace: torch.Tensor | None = None, silu: bool = False
):
    generator = torch.Generator().manual_seed(n + k)
    q = quantize(torch.randn(n, k, generator=generator), scheme)
    x = torch.randn(m, k, generator=generator)
    config = {**spec.config(OP.problem(f"m={m},n={n},k={k},x=fp32,w={scheme}"), TARGET), "split": split}
    out = torch.full((m, n // 2 if silu else n), float("nan"))
    load(spec.KERNEL)(config, x, pack(q, "plain_v1").tensors, None, None, silu, n, workspace, out)
    expected = x @ q.dequantize().T
    if silu:
        expected = torch.nn.functional.silu(expected[:, : n // 2]) * expected[:, n // 2 :]
    return out, expected, config


@pytest.mark.parametrize("split", [1, 2, 3, 5, 64])
@pytest.mark.parametrize(("scheme", "k"), [("int4_g32", 160), ("int8_ch", 200), ("nvfp4", 144)])
def test_any_number_of_parts(scheme: str, k: int, split: int) -> None:
    actual, expected, _ = run(3, 70, k, scheme, split)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_the_workspace_is_left_zero_and_serves_the_next_call() -> None:
    size = spec.scratch_bytes(5, 96, {"bm": 16, "bn": 32})
    space = torch.zeros(2 * size, dtype=torch.uint8)
    for split, silu in ((3, False), (2, True), (1, False)):
        actual, expected, config = run(5, 96, 160, "int4_g32", split, space, silu)
        assert spec.scratch_bytes(5, 96, config) <= space.numel() and not bool(space.any())
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    # Whatever the workspace holds is added to the result.
    space[spec.flag_bytes(5, 96, config) :].view(torch.float32)[0] = 1.0
    actual, expected, _ = run(5, 96, 160, "int4_g32", 2, space)
    assert float((actual - expected).abs().max()) > 0.5


def test_a_workspace_that_is_too_small_is_refused_by_its_size() -> None:
    with pytest.raises(ValueError, match="the workspace must be 1936 contiguous bytes"):
        run(5, 84, 160, "int4_g32", 2, torch.zeros(64, dtype=torch.uint8))
    assert run(0, 84, 160, "int4_g32", 2)[0].shape == (0, 84)


def test_it_is_asked_for_by_name_alone_and_says_why() -> None:
    assert spec.KERNEL.accepts(OP.problem("m=65,n=64,k=256,w=int4_g128")) == "made for M <= 64, not 65"
    assert not spec.KERNEL.deterministic
    build = Build.of({"torch": "2.11.0", "triton": "3.6.0"}, cuda_archs=(), triton_backends=("cuda",))
    problem = OP.problem("m=4,n=64,k=256,w=int4_g128")
    assert select(OP, problem, [spec.KERNEL], HOPPER, build, Store(), Policy()).best is None
    best = select(
        OP,
        problem,
        [spec.KERNEL],
        HOPPER,
        build,
        Store(),
        Policy(pins={"linear": ("linear_w_triton_atomic",)}),
    ).best
    assert best is not None and best.kernel is spec.KERNEL
