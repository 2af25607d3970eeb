"""The kernels for sm_75, on whatever GPU is here: the driver compiles their PTX for newer ones as well. Every instance and partition, tails,
unaligned and strided x, poisoned and guarded outputs, repeated calls, the examples of the operations."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm75 import decode, gemm
from gristmill.kernels.linear.frag16_sm75._launch_decode import launch as launch_decode
from gristmill.kernels.linear.frag16_sm75._launch_gemm import launch as launch_gemm
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, workspace_of
from gristmill.kernels.moe.grouped_linear.frag16_sm75 import _launch, shapes
from gristmill.quant import QuantTensor
from gristmill.quant.layouts.gguf_frag16_v1 import FACTORED
from tests.calls import make_call
from tests.conftest import HAS_GPU
from tests.gpu.test_linear_sm80 import ONE_HOT, SCALES, column_error, doubled, form_of, packed, weights
from tests.gpu.test_moe_sm80 import COUNTS, experts
from tests.gpu.test_moe_sm80 import error as error_of_experts
from tests.gpu.test_moe_sm80 import packed as packed_experts
from tests.kernels.machine_code import library_of

TURING = HAS_GPU and torch.version.hip is None and torch.cuda.get_device_capability() >= (7, 5)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not TURING, reason="needs an NVIDIA GPU from sm_75 on"),
    pytest.mark.skipif(not library_of("75").is_file(), reason="rare: GRISTMILL_RARE=on builds the library"),
]
DEVICE, FP16 = "cuda:0", torch.float16
REGISTRY = default_registry()
KERNELS = [kernel for kernel in REGISTRY.all_kernels() if kernel.name.endswith("_sm75")]
LIMIT, EXPERTS_LIMIT = 5e-4, 1e-3
Config = dict[str, object]


def decode_configs(scheme: str, n: int, k: int) -> list[Config]:
    """Every instance, with every split that leaves no warp without work, and one that does."""
    form = form_of(scheme)
    found: list[Config] = [
        {
            "format": form.name,
            "tile_bytes": form.tile_bytes,
            "nt": 1,
            "rt": shape.rt,
            "wk": shape.wk,
            "split": split,
        }
        for shape, split in decode.candidates(form, n, k)
    ]
    return [*found, found[0] | {"split": 3}]


def gemm_configs(scheme: str) -> list[Config]:
    """Every instance: a CTA per tile; CTAs that walk over tiles; tiles shared by CTAs evenly and unevenly."""
    form = form_of(scheme)
    return [
        {
            "format": form.name,
            "tile_bytes": form.tile_bytes,
            "mt": shape.mt,
            "warps": shape.warps,
            "grid": grid,
            "share": share,
        }
        for shape in gemm.shapes_of(form)
        for grid, share in ((1, 0), (3, 0), (4, 1), (7, 1), (61, 1), (4000, 1))
    ]


def configs(scheme: str, m: int, n: int, k: int) -> list[Config]:
    """Those of both schedules that take m rows of x."""
    return [*(decode_configs(scheme, n, k) if m <= decode.ROWS else ()), *gemm_configs(scheme)]


def run(
    x: torch.Tensor,
    q: QuantTensor,
    config: Config,
    tensors: list[torch.Tensor],
    workspace: torch.Tensor | None = None,
    **epilogue: torch.Tensor,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that the rows around it stay untouched."""
    m, n = x.shape[0], q.n
    buffer = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device=DEVICE)
    out = buffer[1 : m + 1]
    bias, residual = epilogue.get("bias"), epilogue.get("residual")
    call = make_call("linear", x, tensors, bias, residual, False, n, workspace, out)
    (launch_gemm if "mt" in config else launch_decode)(config, call)  # type: ignore[arg-type]
    assert bool(buffer[0].isnan().all()) and bool(buffer[m + 1].isnan().all())
    return out


def rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """Random x [m, k]."""
    return torch.randn(m, k, device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(seed)).half()


@pytest.mark.parametrize(("scheme", "scales"), SCALES)
def test_every_instance(scheme: str, scales: torch.dtype) -> None:
    for n, k in ((1000, 4096), (17, 384)):
        q = weights(scheme, n, k, scales=scales)
        w, tensors = q.dequantize().double(), packed(q)
        for m in (1, 2, 7, 8):
            x = rows(64 // m * m, k, seed=m)  # the RMS of a column needs many rows
            for config in decode_configs(scheme, n, k):
                y = torch.cat([run(x[i : i + m], q, config, tensors) for i in range(0, len(x), m)])
                assert column_error(y, x, w) < LIMIT, (m, config)
        for m in (64, 131, 300):
            x = rows(m, k, seed=m)
            for config in gemm_configs(scheme):
                assert column_error(run(x, q, config, tensors), x, w) < LIMIT, (m, config)


@pytest.mark.parametrize(
    "scheme", ["int4_g128", "int4_g32_zp", "mxfp4", "nvfp4", "int8_g32", "fp8_block", "int5_g32_min"]
)
def test_a_doubled_scale_would_show(scheme: str) -> None:
    q, x = weights(scheme, 300, 512), rows(64, 512)
    w, tensors = q.dequantize().double(), packed(doubled(q, 2 if scheme == "fp8_block" else 299, 2))
    for config in decode_configs(scheme, 300, 512):
        y = torch.cat([run(x[i : i + 8], q, config, tensors) for i in range(0, 64, 8)])
        assert column_error(y, x, w) > 8 * LIMIT, config
    for config in gemm_configs(scheme):
        assert column_error(run(x, q, config, tensors), x, w) > 8 * LIMIT, config


@pytest.mark.parametrize(("scheme", "factored"), ONE_HOT)
def test_one_hot_gives_the_weight_rounded_once(scheme: str, factored: bool) -> None:
    q = weights(scheme, 96, 256, scales=torch.float32 if factored else FP16)
    expected, tensors, x = q.dequantize().half(), packed(q), torch.eye(256, device=DEVICE).half()
    for config in decode_configs(scheme, 96, 256):
        y = torch.cat([run(x[i : i + 8], q, config, tensors) for i in range(0, 256, 8)])
        assert torch.equal(y.T, expected), config
    for config in gemm_configs(scheme):
        assert torch.equal(run(x, q, config, tensors).T, expected), config


@pytest.mark.parametrize("scheme", ["int4_ch", "nvfp4", "int8_g32", "fp8", "int5_g32_min"])
def test_strided_and_unaligned_rows_give_the_same_bits(scheme: str) -> None:
    for n, k in ((130, 1152), (264, 1120)):
        q = weights(scheme, n, k)
        tensors = packed(q)
        for m in (1, 8, 33, 150):
            x = rows(m, k)
            for config in configs(scheme, m, n, k):
                expected = run(x, q, config, tensors)
                for offset, stride in ((0, k + 12), (1, k + 1), (3, k + 16)):
                    wide = torch.full((m, stride + 8), float("nan"), dtype=FP16, device=DEVICE)
                    view = wide[:, offset : offset + k]
                    view.copy_(x)
                    assert torch.equal(run(view, q, config, tensors), expected), (m, offset, stride, config)


@pytest.mark.parametrize("scheme", ["int4_g64_zp", "mxfp4", "int8_ch", "fp8_block", *FACTORED])
@pytest.mark.parametrize(("m", "n"), [(3, 200), (8, 200), (16, 200), (70, 1003)])
def test_bias_residual_and_a_dirty_workspace(scheme: str, m: int, n: int) -> None:
    q, x = weights(scheme, n, 4096), rows(m, 4096) / 16  # sums stay within fp16's range
    tensors, w = packed(q), q.dequantize().float()
    bias, residual = rows(1, n, seed=1)[0], rows(m, n, seed=2)
    expected = x.float() @ w.T + bias.float() + residual.float()
    for config in configs(scheme, m, n, 4096):
        size = workspace_of(config) if "mt" in config else decode.workspace_of(n, config)  # type: ignore[arg-type]
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        workspace[:COUNTER_BYTES] = 0
        first = run(x, q, config, tensors, workspace, bias=bias, residual=residual)
        assert not bool(workspace[:COUNTER_BYTES].any()), "counters are zero after a call"
        torch.testing.assert_close(
            first.float(), expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max())
        )
        for _ in range(3):
            assert torch.equal(run(x, q, config, tensors, workspace, bias=bias, residual=residual), first)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("scheme", "scales"), SCALES)
def test_every_shape_of_experts(scheme: str, scales: torch.dtype, gather: bool) -> None:
    n, k, form = 200, 640, form_of(scheme)
    q, count = experts(scheme, len(COUNTS), n, k, scales), sum(COUNTS)
    top_k = 3 if gather else 1
    places = torch.randperm(count, device=DEVICE).int() if gather else None
    x = rows(-(-count // top_k), k)
    offsets = torch.tensor([0, *COUNTS], device=DEVICE).cumsum(0).int()
    for shape in shapes.shapes_of(form):
        for grid in (100000, 3):
            sizes = {"mt": shape.mt, "warps": shape.warps, "grid": grid}
            buffer = torch.full((count + 2, n), float("nan"), dtype=FP16, device=DEVICE)
            given = (
                x,
                packed_experts(q),
                offsets,
                places,
                top_k,
                False,
                n,
                None,
                False,
                1.702,
                7.0,
                buffer[1:-1],
            )
            config: Config = {"format": form.name, "tile_bytes": form.tile_bytes, **sizes}
            _launch.launch(config, make_call("grouped_linear", *given))  # type: ignore[arg-type]
            assert bool(buffer[0].isnan().all()) and bool(buffer[-1].isnan().all())
            assert error_of_experts(buffer[1:-1], x, q, COUNTS, places, top_k) < EXPERTS_LIMIT, (shape, grid)


@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
def test_every_example(kernel: Kernel) -> None:
    op, target = REGISTRY.op(kernel.op), Target.parse("sm_75")
    problems = [op.problem(text) for text in (*kernel.examples, *map(str, op.examples))]
    accepted = [problem for problem in problems if kernel.accepts(problem) is None]
    assert len(accepted) >= len(kernel.examples)
    for problem in accepted:
        for config in (kernel.config(problem, target), *kernel.space(problem, target)):  # type: ignore[misc]
            result = verify(op, kernel, config, problem, DEVICE)
            assert result.ok, (str(problem), config, result)
