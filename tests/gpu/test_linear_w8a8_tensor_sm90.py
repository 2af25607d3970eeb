"""linear_w8a8_tensor_sm90 on Hopper: bits of linear_w8a8_sm90 with the same codes and scales, the quantizer, strides, graphs, examples."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.w8a8_sm80._launch import quantize_to_fp8
from gristmill.kernels.linear.w8a8_sm80._launch import rows_of as rows_to_quantize
from gristmill.kernels.linear.w8a8_sm80.args import QUANTIZE_FP8
from gristmill.kernels.linear.w8a8_sm90._launch import launch as launch_of_rows
from gristmill.kernels.linear.w8a8_tensor_sm90 import launch, room_of
from gristmill.kernels.native import cuda_entry
from gristmill.quant import pack
from gristmill.quant import quantize as quantize_weight
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w8a8_tensor_sm90")
TARGET = Target.parse("sm_90")


def rows_of(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator(device=DEVICE).manual_seed(m + k)
    sizes = torch.exp(torch.randn(m, 1, device=DEVICE, generator=generator))
    return (torch.randn(m, k, device=DEVICE, generator=generator) * sizes).to(dtype)


def config_of(m: int, n: int, k: int) -> Config:
    """The default of a problem."""
    return KERNEL.config(OP.problem(f"m={m},n={n},k={k},w=fp8.fp8"), TARGET)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 16), (3, 144), (70, 2880), (300, 8224)])
def test_the_quantizer_bit_for_bit(m: int, k: int, dtype: torch.dtype) -> None:
    x, room = rows_of(m, k, dtype), room_of(m, k, 0, given=False)
    workspace = torch.full((room.size,), 255, dtype=torch.uint8, device=DEVICE)
    entry = cuda_entry("gm_quantize_fp8_sm90", QUANTIZE_FP8)
    quantize_to_fp8(entry, "fp8", rows_to_quantize(x, m, k, workspace.data_ptr(), room))
    expected = quantize_activation(x, "fp8")
    assert torch.equal(workspace[: m * k].view(m, k), expected.values.view(torch.uint8))
    scales = workspace[room.scales : room.scales + 4 * m].view(torch.float32)
    assert torch.equal(scales, expected.scales.expand(m))


@pytest.mark.parametrize("w", ["fp8", "fp8_ch"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (7, 257, 2880), (65, 130, 272), (300, 520, 1168)])
def test_bits_are_those_of_the_product_with_scales_of_rows(m: int, n: int, k: int, w: str) -> None:
    x, config = rows_of(m, k), config_of(m, n, k)
    tensors = pack(quantize_weight(rows_of(n, k, torch.float32), w), "plain_v1").tensors
    made = quantize_activation(x, "fp8")
    expected, out = (torch.full((m, n), float("nan"), dtype=x.dtype, device=DEVICE) for _ in range(2))
    scales = made.scales.view(1, 1).expand(m, 1).contiguous()
    launch_of_rows(
        config,
        make_call(
            "linear", x, tensors, None, None, False, n, None, codes=made.values, scales=scales, out=expected
        ),
    )
    wide = torch.full((m, k + 24), float("nan"), dtype=x.dtype, device=DEVICE)
    for start in (None, 8, 3):  # the last is one that loads of 16 bytes cannot read
        view = x if start is None else wide[:, start : start + k].copy_(x)
        launch(
            config, make_call("linear", view, tensors, None, None, False, n, None, out.fill_(float("nan")))
        )
        assert torch.equal(out, expected), start
    one = made.scales.view(1, 1)
    launch(
        config,
        make_call(
            "linear", x, tensors, None, None, False, n, None, codes=made.values, scales=one, out=out.zero_()
        ),
    )
    assert torch.equal(out, expected)


def test_every_example() -> None:
    problems = [OP.problem(text) for text in (*KERNEL.examples, *map(str, OP.examples))]
    accepted = [problem for problem in problems if KERNEL.accepts(problem) is None]
    assert len(accepted) > len(KERNEL.examples)
    for problem in accepted:
        for config in KERNEL.space(problem, TARGET):  # type: ignore[misc]
            result = verify(OP, KERNEL, config, problem, DEVICE)
            assert result.ok, (str(problem), config, result)


def test_a_captured_graph() -> None:
    m, n, k = 5, 512, 8192
    x, config = rows_of(m, k), config_of(m, n, k)
    tensors = pack(quantize_weight(rows_of(n, k, torch.float32), "fp8"), "plain_v1").tensors
    workspace = torch.zeros(room_of(m, k, 0, given=False).size, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(m, n, dtype=x.dtype, device=DEVICE)
    call = make_call("linear", x, tensors, None, None, False, n, workspace, out)
    launch(config, call)
    y = out.clone()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(config, call)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, y)
