"""The kernels over frag16 tiles for sm_80 and newer, on whatever GPU is here: every instance and split, tails, unaligned and strided x,
poisoned and guarded outputs, repeated calls, the examples of the operation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm80 import decode, gemm
from gristmill.kernels.linear.frag16_sm80._launch_decode import launch as launch_decode
from gristmill.kernels.linear.frag16_sm80._launch_gemm import launch as launch_gemm
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format, format_of
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.layouts.gguf_frag16_v1 import FACTORED
from tests.calls import make_call
from tests.conftest import HAS_GPU

NEWER = HAS_GPU and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NEWER, reason="needs an NVIDIA GPU from sm_80 on")]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
KERNELS = [
    default_registry().kernel("linear", f"linear_w{bits}a16_{schedule}_sm80")
    for bits in (4, 8)
    for schedule in ("decode", "gemm")
] + [default_registry().kernel("linear", f"linear_gguf_{schedule}_sm80") for schedule in ("decode", "gemm")]
SCHEMES = [*dict.fromkeys(scheme for form in FORMATS for scheme in form.schemes)]
SCALES = [
    (scheme, scales)
    for scheme in SCHEMES
    for scales in (torch.bfloat16, torch.float16, torch.float32)
    if scales == torch.bfloat16
    or (scheme.startswith("int") and (scales == torch.float16 or scheme in FACTORED))
]
"""Schemes, and the types of their scales: 16-bit floats of integers, float32 of K-quants, which are products."""
ONE_HOT = [(scheme, False) for scheme in SCHEMES] + [(scheme, True) for scheme in FACTORED]
"""Schemes under scales of the type of x, and K-quants."""
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def form_of(scheme: str) -> Format:
    """The format that holds a scheme."""
    form = format_of(QuantScheme.parse(scheme))
    assert form is not None
    return form


def products(scales: torch.Tensor, most: int) -> torch.Tensor:
    """float32 [N, G] near the scales [N, G], as K-quants have them: a float16 of a row's 256 columns times an integer."""
    size = 8 if scales.shape[1] % 8 == 0 else 4  # also right for the last half of an odd number of tiles
    runs = scales.float().unflatten(1, (-1, size))
    d = (runs.abs().amax(2, keepdim=True) / most).half().float()
    return (d * (runs / d.clamp(min=1e-30)).round()).flatten(1)


def weights(scheme: str, n: int, k: int, seed: int = 0, scales: torch.dtype = torch.bfloat16) -> QuantTensor:
    """A random weight; `scales`: their type where these are 16-bit floats, or float32 for a K-quant."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    w = torch.randn(n, k, device=DEVICE, generator=generator)
    q = quantize(w * torch.exp(torch.randn(n, 1, device=DEVICE, generator=generator)), scheme)
    if not q.scheme.is_integer:
        return q
    assert q.scales is not None
    if scales == torch.float32:
        made = products(q.scales, 63 if q.scheme.minimums else 127)
        return dataclasses.replace(q, scales=made, zero=None if q.zero is None else products(q.zero, 63))
    offsets = q.zero.to(scales) if q.scheme.minimums and q.zero is not None else q.zero
    return dataclasses.replace(q, scales=q.scales.to(scales), zero=offsets)


def packed(q: QuantTensor) -> list[torch.Tensor]:
    """The tensors of the layout that the kernels read."""
    return pack(q, form_of(q.scheme.name).layout).tensors


def doubled(q: QuantTensor, row: int, group: int) -> QuantTensor:
    """The weight with one scale doubled."""
    assert q.scales is not None
    scales = q.scales.clone()
    if scales.dtype == torch.float8_e4m3fn:
        scales.view(torch.uint8)[row, group] += 8
    elif scales.dtype == torch.uint8:  # E8M0
        scales[row, group] += 1
    else:
        scales[row, group] *= 2
    return dataclasses.replace(q, scales=scales)


def configs(scheme: str, m: int, n: int, k: int) -> list[dict[str, object]]:
    """Every instance for m rows, with every split that leaves no warp without work, and one that does."""
    form = form_of(scheme)
    found = [
        {"format": form.name, "tile_bytes": form.tile_bytes, "split": split}
        | {name: getattr(shape, name) for name in ("nt", "rt", "wk")}
        for shape, split in decode.candidates(form, m, n, k)
    ]
    return [*found, found[0] | {"split": 3}]


def gemm_configs(scheme: str) -> list[dict[str, object]]:
    """Every instance of the schedule gemm: a CTA per tile; CTAs that walk over tiles; tiles shared by CTAs evenly and unevenly, and none
    because there is too little to share."""
    form = form_of(scheme)
    return [
        {
            "format": form.name,
            "tile_bytes": form.tile_bytes,
            "mt": shape.mt,
            "warps": shape.warps,
            "grid": grid,
        }
        | {"share": share}
        for shape in gemm.shapes_of(form)
        for grid, share in ((1, 0), (3, 0), (4, 1), (7, 1), (61, 1), (4000, 1))
    ]


def launch(config: dict[str, object], call: object) -> None:
    """By the schedule of the configuration."""
    (launch_gemm if "mt" in config else launch_decode)(config, call)  # type: ignore[arg-type]


def run(
    x: torch.Tensor,
    q: QuantTensor,
    config: dict[str, object],
    tensors: list[torch.Tensor],
    workspace: torch.Tensor | None = None,
    **epilogue: torch.Tensor,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that the rows around it stay untouched."""
    m, n = x.shape[0], q.n
    buffer = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device=DEVICE)
    out = buffer[1 : m + 1]
    call = make_call(
        "linear", x, tensors, epilogue.get("bias"), epilogue.get("residual"), False, n, workspace, out
    )
    launch(config, call)
    assert bool(buffer[0].isnan().all()) and bool(buffer[m + 1].isnan().all())
    return out


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Error of the worst column: |Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over the rows of x."""
    reference = x.double() @ w.T
    scale = x.double().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.double() - reference) / scale).square().mean(0).sqrt().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "scales"), SCALES)
def test_every_instance(scheme: str, dtype: torch.dtype, scales: torch.dtype) -> None:
    for n, k in ((1000, 4096), (17, 384)):
        q = weights(scheme, n, k, scales=scales)
        w, tensors = q.dequantize().double(), packed(q)
        for m in (1, 2, 7, 8, 9, 16):
            rows = max(m, 64 // m * m)  # the RMS of a column needs many rows
            generator = torch.Generator(device=DEVICE).manual_seed(m)
            x = torch.randn(rows, k, device=DEVICE, generator=generator).to(dtype)
            for config in configs(scheme, m, n, k):
                y = torch.cat([run(x[i : i + m], q, config, tensors) for i in range(0, rows, m)])
                assert column_error(y, x, w) < LIMIT[dtype], (m, config)


@pytest.mark.parametrize(
    "scheme",
    [
        "int4_g128",
        "int4_g64",
        "int4_g32_zp",
        "mxfp4",
        "nvfp4",
        "int8_g128",
        "fp8_block",
        "int4_g32_min",
        "int5_g32",
        "int6_g16",
    ],
)
def test_a_doubled_scale_would_show(scheme: str) -> None:
    q = weights(scheme, 300, 512)
    x = torch.randn(64, 512, device=DEVICE).bfloat16()
    row = 2 if scheme == "fp8_block" else 299
    w, tensors = q.dequantize().double(), packed(doubled(q, row, 2))
    for config in configs(scheme, 16, 300, 512):
        y = torch.cat([run(x[i : i + 16], q, config, tensors) for i in range(0, 64, 16)])
        assert column_error(y, x, w) > 8 * LIMIT[torch.bfloat16], config
    for config in gemm_configs(scheme):
        assert column_error(run(x, q, config, tensors), x, w) > 8 * LIMIT[torch.bfloat16], config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "factored"), ONE_HOT)
def test_one_hot_gives_the_weight_rounded_once(scheme: str, factored: bool, dtype: torch.dtype) -> None:
    q = weights(scheme, 96, 256, scales=torch.float32 if factored else dtype)
    expected, tensors = q.dequantize().to(dtype), packed(q)
    for m in (8, 16):
        for config in configs(scheme, m, 96, 256):
            x = torch.eye(256, device=DEVICE).to(dtype)
            y = torch.cat([run(x[i : i + m], q, config, tensors) for i in range(0, 256, m)])
            assert torch.equal(y.T, expected), config


@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4", "int8_g32", "fp8", "int5_g32_min"])
def test_strided_and_unaligned_rows_of_x_give_the_same_bits(scheme: str) -> None:
    q = weights(scheme, 130, 1152)
    tensors = packed(q)
    for m in (1, 9, 16):
        x = torch.randn(m, 1152, device=DEVICE).bfloat16()
        for config in configs(scheme, m, 130, 1152):
            expected = run(x, q, config, tensors)
            for offset, stride in ((0, 1160), (1, 1153), (3, 1168)):
                wide = torch.full((m, stride + 8), float("nan"), dtype=x.dtype, device=DEVICE)
                view = wide[:, offset : offset + 1152]
                view.copy_(x)
                assert torch.equal(run(view, q, config, tensors), expected), (m, offset, stride, config)


@pytest.mark.parametrize(
    "scheme", ["int4_g64_zp", "mxfp4", "int8_ch", "fp8_block", "int4_g32_min", "int6_g16"]
)
@pytest.mark.parametrize(("m", "n"), [(3, 200), (16, 200), (70, 200), (70, 1003)])
def test_bias_residual_and_a_dirty_workspace(scheme: str, m: int, n: int) -> None:
    q = weights(scheme, n, 4096)
    tensors, w = packed(q), q.dequantize().float()
    x = torch.randn(m, 4096, device=DEVICE).bfloat16()
    bias, residual = torch.randn(n, device=DEVICE).bfloat16(), torch.randn(m, n, device=DEVICE).bfloat16()
    expected = x.float() @ w.T + bias.float() + residual.float()
    for config in configs(scheme, m, n, 4096) if m <= 16 else gemm_configs(scheme):
        size = gemm.workspace_of(config) if "mt" in config else decode.workspace_of(n, config)  # type: ignore[arg-type]
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        workspace[: decode.COUNTER_BYTES] = 0
        first = run(x, q, config, tensors, workspace, bias=bias, residual=residual)
        assert not bool(workspace[: decode.COUNTER_BYTES].any()), "counters are zero after a call"
        torch.testing.assert_close(
            first.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())
        )
        for _ in range(3):
            assert torch.equal(run(x, q, config, tensors, workspace, bias=bias, residual=residual), first)


@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
def test_every_example(kernel: Kernel) -> None:
    target = Target.parse("sm_90")
    problems = [OP.problem(text) for text in (*kernel.examples, *map(str, OP.examples))]
    accepted = [problem for problem in problems if kernel.accepts(problem) is None]
    assert len(accepted) >= len(kernel.examples)
    for problem in accepted:
        for config in (kernel.config(problem, target), *kernel.space(problem, target)):  # type: ignore[misc]
            result = verify(OP, kernel, config, problem, DEVICE)
            assert result.ok, (str(problem), config, result)


def test_a_captured_graph() -> None:
    q = weights("int4_g128", 512, 8192)
    tensors = packed(q)
    x = torch.randn(5, 8192, device=DEVICE).bfloat16()
    config = next(c for c in configs("int4_g128", 5, 512, 8192) if int(c["split"]) > 1)  # type: ignore[call-overload]
    expected = run(x, q, config, tensors)
    workspace = torch.zeros(
        decode.workspace_of(512, config),  # type: ignore[arg-type]
        dtype=torch.uint8,
        device=DEVICE,
    )
    out = torch.empty(5, 512, dtype=x.dtype, device=DEVICE)
    call = make_call("linear", x, tensors, None, None, False, 512, workspace, out)
    launch(config, call)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(config, call)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "scales"), SCALES)
def test_every_instance_of_gemm(scheme: str, dtype: torch.dtype, scales: torch.dtype) -> None:
    for n, k in ((1000, 4096), (17, 384)):
        q = weights(scheme, n, k, scales=scales)
        w, tensors = q.dequantize().double(), packed(q)
        for m in (64, 131, 300):
            generator = torch.Generator(device=DEVICE).manual_seed(m)
            x = torch.randn(m, k, device=DEVICE, generator=generator).to(dtype)
            for config in gemm_configs(scheme):
                assert column_error(run(x, q, config, tensors), x, w) < LIMIT[dtype], (m, config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "factored"), ONE_HOT)
def test_gemm_of_one_hot_rows_gives_the_weight_rounded_once(
    scheme: str, factored: bool, dtype: torch.dtype
) -> None:
    q = weights(scheme, 304, 256, scales=torch.float32 if factored else dtype)
    x = torch.eye(256, device=DEVICE).to(dtype)
    expected, tensors = q.dequantize().to(dtype), packed(q)
    for config in gemm_configs(scheme):
        assert torch.equal(run(x, q, config, tensors).T, expected), config


@pytest.mark.parametrize("scheme", ["int4_ch", "int8_ch", "fp8_block"])
def test_gemm_takes_strided_and_unaligned_rows_ragged_columns_and_any_number_of_rows(scheme: str) -> None:
    for n, k in ((130, 1100), (264, 1152)):
        q = weights(scheme, n, k)
        tensors = packed(q)
        x = torch.randn(150, k, device=DEVICE).bfloat16()
        for config in gemm_configs(scheme):
            expected = run(x, q, config | {"grid": 1, "share": 0}, tensors)
            for m in (1, 31, 33, 128, 150):
                y = run(x[:m], q, config | {"grid": 1, "share": 0}, tensors)
                assert torch.equal(y, expected[:m]), (m, config)
            for offset, stride in ((0, k + 12), (1, k + 1), (3, k + 16)):
                wide = torch.full((150, stride + 8), float("nan"), dtype=x.dtype, device=DEVICE)
                view = wide[:, offset : offset + k]
                view.copy_(x)
                assert torch.equal(run(view, q, config, tensors), run(x, q, config, tensors)), (
                    offset,
                    config,
                )
