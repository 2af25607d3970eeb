"""linear_w8a8_sm80 and linear_w8a8_sm75 on whatever GPU is here: every instance and partition bit for bit, tails, strides, given codes, repeated
calls, graphs, the examples of the operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES
from gristmill.kernels.linear.w8a8_sm80 import _launch_sm75, _launch_sm80
from gristmill.kernels.linear.w8a8_sm80.shapes import INT8, INT8_TURING, room_of
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.conftest import HAS_GPU
from tests.kernels.machine_code import library_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

CAPABILITY = torch.cuda.get_device_capability() if HAS_GPU and torch.version.hip is None else (0, 0)
KINDS = [
    operands
    for operands, oldest in ((INT8, (8, 0)), (INT8_TURING, (7, 5)))
    if oldest <= CAPABILITY and library_of(operands.arch).is_file()
]
"""Those that this device runs and this build has."""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not KINDS, reason="needs an NVIDIA GPU from sm_75 on, and a library for it"),
]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
KERNELS = [default_registry().kernel("linear", f"linear_w8a8_sm{operands.arch}") for operands in KINDS]
CONFIGS: list[Config] = [
    {
        "format": operands.format,
        "activation": "int8_token",
        "mt": shape.mt,
        "warps": shape.warps,
        "grid": grid,
        "share": share,
    }
    for operands in KINDS
    for shape in operands.shapes
    for grid, share in ((1, 0), (3, 0), (4, 1), (7, 1), (61, 1), (4000, 1))
]
"""Every instance: a CTA per tile; CTAs that walk over tiles; tiles shared by CTAs evenly and unevenly, and none because there is too
little to share."""


def launch(config: Config, call: LinearCall) -> None:
    """By the launcher of the configuration's kernel."""
    (_launch_sm75 if config["format"] == INT8_TURING.format else _launch_sm80).launch(config, call)


def rows_of(m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    sizes = torch.exp(torch.randn(m, 1, device=DEVICE, generator=generator))
    return (torch.randn(m, k, device=DEVICE, generator=generator) * sizes).to(dtype)


def weight(n: int, k: int) -> QuantTensor:
    """A random weight with a scale per row."""
    return quantize(rows_of(n, k, torch.float32, seed=2), "int8_ch")


def expected(
    x: torch.Tensor,
    q: QuantTensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product in the order of roundings of the kernel: an exact sum of codes, float32 scales, bias and residual, one rounding."""
    quantized = quantize_activation(x, "int8_token")
    assert q.scales is not None
    sums = (quantized.values.double() @ (q.codes.double() - 128).T).float()
    y = sums * (quantized.scales * q.scales.float().flatten())
    for one in (bias, residual):
        y = y if one is None else y + one.float()
    return y.to(x.dtype)


def run(
    x: torch.Tensor,
    q: QuantTensor,
    config: Config,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    given: bool = False,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that the rows around it stay untouched."""
    m, n = x.shape[0], q.n
    buffer = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device=DEVICE)
    out, tensors = buffer[1 : m + 1], pack(q, "plain_v1").tensors
    quantized = quantize_activation(x, "int8_token") if given else None
    codes, scales = (quantized.values, quantized.scales) if quantized else (None, None)
    launch(
        config,
        make_call(
            "linear", x, tensors, bias, residual, False, n, workspace, codes=codes, scales=scales, out=out
        ),
    )
    assert bool(buffer[0].isnan().all()) and bool(buffer[m + 1].isnan().all())
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (17, 272), (257, 16)])
def test_every_instance_is_exact(n: int, k: int, dtype: torch.dtype) -> None:
    q = weight(n, k)
    for m in (1, 7, 16, 64, 131, 257):
        x = rows_of(m, k, dtype)
        y = expected(x, q)
        for config in CONFIGS:
            assert torch.equal(run(x, q, config), y), (m, config)


def test_the_largest_sums() -> None:
    """65,536 products of codes of one sign, where float32 sums would be off."""
    q = weight(130, 1 << 16)
    q = q.with_tensors({**q.tensors(), "codes": q.codes | 0x80}, q.shape)
    x = rows_of(40, 1 << 16).abs()
    for config in CONFIGS:
        assert torch.equal(run(x, q, config), expected(x, q)), config


@pytest.mark.parametrize(("m", "n"), [(3, 200), (70, 200), (70, 1003)])
def test_bias_residual_and_a_dirty_workspace(m: int, n: int) -> None:
    q, x = weight(n, 2048), rows_of(m, 2048)
    bias, residual = rows_of(1, n)[0], rows_of(m, n, seed=5)
    for config in CONFIGS:
        size = room_of(config, m, 2048, 0, given=False).size
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        workspace[:COUNTER_BYTES] = 0
        for given in (False, True):
            y = run(x, q, config, bias, residual, given, workspace)
            assert torch.equal(y, expected(x, q, bias, residual)), (config, given)
            assert not bool(workspace[:COUNTER_BYTES].any()), "counters are zero after a call"


def test_planted_faults_show() -> None:
    """A doubled scale, a code that is off by one, a row of x replaced."""
    q, x = weight(300, 512), rows_of(64, 512)
    assert q.scales is not None
    scales, codes, other = q.scales.clone(), q.codes.clone(), x.clone()
    scales[299] *= 2
    codes[7, 511] ^= 1
    other[63] = x[0]
    y = expected(x, q)
    for config in CONFIGS:
        assert torch.equal(run(x, q, config), y)
        for rows, one in (
            (x, q.with_tensors({**q.tensors(), "scales": scales}, q.shape)),
            (x, q.with_tensors({**q.tensors(), "codes": codes}, q.shape)),
            (other, q),
        ):
            assert not torch.equal(run(rows, one, config), y), config


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
def test_scales_of_other_types(scales: torch.dtype) -> None:
    q, x = weight(200, 272), rows_of(70, 272)
    assert q.scales is not None
    q = q.with_tensors({**q.tensors(), "scales": q.scales.to(scales)}, q.shape)
    for config in CONFIGS:
        assert torch.equal(run(x, q, config), expected(x, q)), config


def test_strided_and_unaligned_rows_of_x_give_the_same_bits() -> None:
    q, x = weight(130, 1152), rows_of(20, 1152)
    for config in CONFIGS:
        y = expected(x, q)
        for offset, stride in ((0, 1160), (1, 1153), (3, 1168)):
            wide = torch.full((20, stride + 8), float("nan"), dtype=x.dtype, device=DEVICE)
            view = wide[:, offset : offset + 1152]
            view.copy_(x)
            assert torch.equal(run(view, q, config), y), (offset, stride, config)
    flat = torch.empty(1152 + 3, dtype=x.dtype, device=DEVICE)[3:].copy_(x[0])
    assert torch.equal(run(flat.view(1, -1), q, CONFIGS[0]), expected(x[:1], q))  # contiguous, yet unaligned


def test_a_row_does_not_depend_on_the_others() -> None:
    """Batch invariant: of any number of rows, with the configurations that selection gives them."""
    q, x = weight(1000, 4096), rows_of(300, 4096)
    target, y = Target.parse("sm_90"), expected(x, q)
    for m in (1, 2, 8, 17, 64, 65, 128, 300):
        problem = OP.problem(f"m={m},n=1000,k=4096,w=int8_ch.int8_token")
        for kernel in KERNELS:
            assert torch.equal(run(x[:m], q, kernel.config(problem, target)), y[:m]), (kernel.name, m)


def test_every_example() -> None:
    target = Target.parse("sm_90")
    for kernel in KERNELS:
        problems = [OP.problem(text) for text in (*kernel.examples, *map(str, OP.examples))]
        accepted = [problem for problem in problems if kernel.accepts(problem) is None]
        assert len(accepted) > len(kernel.examples)
        for problem in accepted:
            for config in kernel.space(problem, target):  # type: ignore[misc]
                result = verify(OP, kernel, config, problem, DEVICE)
                assert result.ok, (kernel.name, str(problem), config, result)


def test_a_captured_graph() -> None:
    q, x = weight(512, 8192), rows_of(5, 8192)
    for config in CONFIGS:
        if (config["mt"], config["grid"]) != (16, 61):
            continue
        room = room_of(config, 5, 8192, 0, given=False)
        workspace = torch.zeros(room.size, dtype=torch.uint8, device=DEVICE)
        out = torch.empty(5, 512, dtype=x.dtype, device=DEVICE)
        call = make_call("linear", x, pack(q, "plain_v1").tensors, None, None, False, 512, workspace, out)
        launch(config, call)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            launch(config, call)
        for _ in range(20):
            out.zero_()
            graph.replay()
            assert torch.equal(out, expected(x, q)), config
