"""The kernels over frag16 tiles for sm_80 and newer, on whatever GPU is here: every instance and split, tails, unaligned and strided x,
poisoned and guarded outputs, repeated calls, the examples of the operation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm80 import decode
from gristmill.kernels.linear.frag16_sm80._launch import launch
from gristmill.kernels.linear.frag16_sm80.formats import format_of
from gristmill.quant import QuantTensor, pack, quantize
from tests.calls import make_call
from tests.conftest import HAS_GPU

NEWER = HAS_GPU and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NEWER, reason="needs an NVIDIA GPU from sm_80 on")]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w4a16_decode_sm80")
SCHEMES = default_registry().layout("w4_frag16_v1").schemes
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def weights(scheme: str, n: int, k: int, seed: int = 0, scales: torch.dtype = torch.bfloat16) -> QuantTensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    w = torch.randn(n, k, device=DEVICE, generator=generator)
    q = quantize(w * torch.exp(torch.randn(n, 1, device=DEVICE, generator=generator)), scheme)
    assert q.scales is not None
    return dataclasses.replace(q, scales=q.scales.to(scales))


def configs(scheme: str, m: int, n: int, k: int) -> list[dict[str, object]]:
    """Every instance for m rows, with every split that leaves no warp without work, and one that does."""
    form = format_of(QuantScheme.parse(scheme))
    assert form is not None
    found = [
        {"format": form.name, "tile_bytes": form.tile_bytes, "split": split}
        | {name: getattr(shape, name) for name in ("nt", "rt", "wk")}
        for shape, split in decode.candidates(m, n, k)
    ]
    return [*found, found[0] | {"split": 3}]


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
    launch(config, call)  # type: ignore[arg-type]
    assert bool(buffer[0].isnan().all()) and bool(buffer[m + 1].isnan().all())
    return out


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Error of the worst column: |Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over the rows of x."""
    reference = x.double() @ w.T
    scale = x.double().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.double() - reference) / scale).square().mean(0).sqrt().max())


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_instance(scheme: str, dtype: torch.dtype, scales: torch.dtype) -> None:
    for n, k in ((1000, 4096), (17, 384)):
        q = weights(scheme, n, k, scales=scales)
        w, tensors = q.dequantize().double(), pack(q, "w4_frag16_v1").tensors
        for m in (1, 2, 7, 8, 9, 16):
            rows = max(m, 64 // m * m)  # the RMS of a column needs many rows
            generator = torch.Generator(device=DEVICE).manual_seed(m)
            x = torch.randn(rows, k, device=DEVICE, generator=generator).to(dtype)
            for config in configs(scheme, m, n, k):
                y = torch.cat([run(x[i : i + m], q, config, tensors) for i in range(0, rows, m)])
                assert column_error(y, x, w) < LIMIT[dtype], (m, config)


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g64", "int4_g32_zp"])
def test_a_doubled_scale_would_show(scheme: str) -> None:
    q = weights(scheme, 64, 512)
    x = torch.randn(64, 512, device=DEVICE).bfloat16()
    assert q.scales is not None
    changed = q.scales.clone()
    changed[5, 2] *= 2
    tensors = pack(dataclasses.replace(q, scales=changed), "w4_frag16_v1").tensors
    config: dict[str, object] = dict(
        KERNEL.config(OP.problem(f"m=16,n=64,k=512,w={scheme}"), Target.parse("sm_80"))
    )
    y = torch.cat([run(x[i : i + 16], q, config, tensors) for i in range(0, 64, 16)])
    assert column_error(y, x, q.dequantize().double()) > 8 * LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_hot_gives_the_weight_rounded_once(scheme: str, dtype: torch.dtype) -> None:
    q = weights(scheme, 96, 256, scales=dtype)
    expected, tensors = q.dequantize().to(dtype), pack(q, "w4_frag16_v1").tensors
    for m in (8, 16):
        for config in configs(scheme, m, 96, 256):
            x = torch.eye(256, device=DEVICE).to(dtype)
            y = torch.cat([run(x[i : i + m], q, config, tensors) for i in range(0, 256, m)])
            assert torch.equal(y.T, expected), config


def test_strided_and_unaligned_rows_of_x_give_the_same_bits() -> None:
    q = weights("int4_g128", 130, 1152)
    tensors = pack(q, "w4_frag16_v1").tensors
    for m in (1, 9, 16):
        x = torch.randn(m, 1152, device=DEVICE).bfloat16()
        for config in configs("int4_g128", m, 130, 1152):
            expected = run(x, q, config, tensors)
            for offset, stride in ((0, 1160), (1, 1153), (3, 1168)):
                wide = torch.full((m, stride + 8), float("nan"), dtype=x.dtype, device=DEVICE)
                view = wide[:, offset : offset + 1152]
                view.copy_(x)
                assert torch.equal(run(view, q, config, tensors), expected), (m, offset, stride, config)


def test_bias_residual_and_a_dirty_workspace() -> None:
    q = weights("int4_g64_zp", 200, 4096)
    tensors, w = pack(q, "w4_frag16_v1").tensors, q.dequantize().float()
    for m in (3, 16):
        x = torch.randn(m, 4096, device=DEVICE).bfloat16()
        bias, residual = (
            torch.randn(200, device=DEVICE).bfloat16(),
            torch.randn(m, 200, device=DEVICE).bfloat16(),
        )
        expected = x.float() @ w.T + bias.float() + residual.float()
        for config in configs("int4_g64_zp", m, 200, 4096):
            sizes = (200, *(int(config[name]) for name in ("nt", "rt", "split")))  # type: ignore[call-overload]
            workspace = torch.full((decode.workspace_bytes(*sizes),), 255, dtype=torch.uint8, device=DEVICE)
            workspace[: decode.COUNTER_BYTES] = 0
            first = run(x, q, config, tensors, workspace, bias=bias, residual=residual)
            assert not bool(workspace[: decode.COUNTER_BYTES].any()), "counters are zero after a call"
            torch.testing.assert_close(
                first.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())
            )
            for _ in range(3):
                assert torch.equal(run(x, q, config, tensors, workspace, bias=bias, residual=residual), first)


def test_every_example() -> None:
    target = Target.parse("sm_90")
    problems = [OP.problem(text) for text in (*KERNEL.examples, *map(str, OP.examples))]
    accepted = [problem for problem in problems if KERNEL.accepts(problem) is None]
    assert len(accepted) > len(KERNEL.examples)
    for problem in accepted:
        for config in (KERNEL.config(problem, target), *KERNEL.space(problem, target)):  # type: ignore[misc]
            result = verify(OP, KERNEL, config, problem, DEVICE)
            assert result.ok, (str(problem), config, result)


def test_a_captured_graph() -> None:
    q = weights("int4_g128", 512, 8192)
    tensors = pack(q, "w4_frag16_v1").tensors
    x = torch.randn(5, 8192, device=DEVICE).bfloat16()
    config = next(c for c in configs("int4_g128", 5, 512, 8192) if int(c["split"]) > 1)  # type: ignore[call-overload]
    expected = run(x, q, config, tensors)
    workspace = torch.zeros(
        decode.workspace_bytes(512, *(int(config[name]) for name in ("nt", "rt", "split"))),  # type: ignore[call-overload]
        dtype=torch.uint8,
        device=DEVICE,
    )
    out = torch.empty(5, 512, dtype=x.dtype, device=DEVICE)
    call = make_call("linear", x, tensors, None, None, False, 512, workspace, out)
    launch(config, call)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(config, call)  # type: ignore[arg-type]
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
