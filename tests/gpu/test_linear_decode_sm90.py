"""The decode kernels over frag16 tiles on Hopper: every instance, split and ring depth of both schedules,
tails, unaligned x, poisoned and guarded outputs, repeated calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm90 import _launch_decode, _launch_decode_ws, decode, decode_ws
from gristmill.kernels.native import check
from gristmill.quant import QuantTensor, pack, quantize, unpack
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
TARGET = Target.parse("sm_90")
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
LAYOUT = {
    scheme: f"{name}_frag16_v1"
    for name in ("w4", "f4", "w8")
    for scheme in default_registry().layout(f"{name}_frag16_v1").schemes
}
SCHEMES = tuple(LAYOUT)
KERNELS, WIDE = (
    tuple(
        default_registry().kernel("linear", f"linear_w{bits}a16_{name}_sm90")
        for name in ("decode", "decode_ws")
    )
    for bits in (4, 8)
)


def decode_launch(config: dict[str, object], *arguments: object) -> None:
    """Launches the schedule that the configuration belongs to."""
    (_launch_decode_ws if "wn" in config else _launch_decode).launch(config, make_call("linear", *arguments))  # type: ignore[arg-type]


def weights(scheme: str, n: int, k: int, seed: int = 0, scales: torch.dtype = torch.bfloat16) -> QuantTensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    w = torch.randn(n, k, device=DEVICE, generator=generator)
    q = quantize(w * torch.exp(torch.randn(n, 1, device=DEVICE, generator=generator)), scheme)
    if not q.scheme.is_integer or q.scales is None:
        return q
    return dataclasses.replace(q, scales=q.scales.to(scales))


def run(
    x: torch.Tensor,
    q: QuantTensor,
    config: dict[str, object],
    tensors: list[torch.Tensor] | None = None,
    **epilogue: torch.Tensor,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that the rows around it stay
    untouched."""
    m, n = x.shape[0], q.n
    buffer = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device=DEVICE)
    tensors = tensors or pack(q, LAYOUT[q.scheme.weights]).tensors
    decode_launch(
        config, x, tensors, epilogue.get("bias"), epilogue.get("residual"), False, n, None, buffer[1 : m + 1]
    )
    assert bool(buffer[0].isnan().all()) and bool(buffer[m + 1].isnan().all())
    return buffer[1 : m + 1]


def default(
    m: int, n: int, k: int, scheme: str, x: str = "bf16", kernel: Kernel = KERNELS[0]
) -> dict[str, object]:
    return dict(kernel.config(OP.problem(f"m={m},n={n},k={k},w={scheme},x={x}"), TARGET))


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Error of the worst column: |Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over the rows of x."""
    reference = x.double() @ w.T
    scale = x.double().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.double() - reference) / scale).square().mean(0).sqrt().max())


def every_config(scheme: str, m: int, n: int, k: int) -> list[dict[str, object]]:
    """Returns every instance and split of both schedules, each with its shortest and its longest ring."""
    form = decode.SCHEDULE.format_of(QuantScheme.parse(scheme))
    assert form is not None
    instances: list[dict[str, object]] = []
    for schedule in (decode, decode_ws):
        depths: dict[tuple[object, int], dict[int, dict[str, int]]] = {}
        for shape, split, depth, _ in schedule.candidates(form, m, n, k):  # type: ignore[attr-defined]
            depths.setdefault((shape, split), {})[depth] = schedule.config_of(shape, split, depth)  # type: ignore[attr-defined]
        for configs in depths.values():
            instances += [
                {"format": form.name, "tile_bytes": form.tile_bytes, **configs[depth]}
                for depth in {min(configs), max(configs)}
            ]
    return instances


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_instance(scheme: str, dtype: torch.dtype, scales: torch.dtype) -> None:
    if scales is torch.float16 and not QuantScheme.parse(scheme).is_integer:
        pytest.skip("has no 16-bit scales")
    for n, k in ((1000, 1536), (17, 384)):
        q = weights(scheme, n, k, scales=scales)
        w, tensors = q.dequantize().double(), pack(q, LAYOUT[scheme]).tensors
        for m in (1, 2, 7, 8, 9, 16):
            rows = max(m, 64 // m * m)  # the RMS of a column needs many rows
            x = torch.randn(
                rows, k, device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(m)
            ).to(dtype)
            for config in every_config(scheme, m, n, k):
                y = torch.cat([run(x[i : i + m], q, config, tensors) for i in range(0, rows, m)])
                assert column_error(y, x, w) < LIMIT[dtype], (m, config)


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "nvfp4", "mxfp4", "fp8_block"])
def test_a_doubled_scale_would_show(scheme: str) -> None:
    q = weights(scheme, 64, 512)
    x = torch.randn(64, 512, device=DEVICE).bfloat16()
    assert q.scales is not None
    changed = q.scales.clone()
    row = 0 if scheme == "fp8_block" else 5
    if changed.dtype == torch.uint8:
        changed[row, 2] += 1
    else:
        changed[row, 2] = (changed[row, 2].float() * 2).to(changed.dtype)
    corrupted = dataclasses.replace(q, scales=changed)
    for kernel in KERNELS:
        config = default(16, 64, 512, scheme, kernel=kernel)
        y = torch.cat([run(x[i : i + 16], corrupted, config) for i in range(0, 64, 16)])
        assert column_error(y, x, q.dequantize().double()) > 8 * LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_hot_gives_the_weight_rounded_once(scheme: str, dtype: torch.dtype) -> None:
    q = weights(scheme, 96, 256, scales=dtype)
    expected, tensors = q.dequantize().to(dtype), pack(q, LAYOUT[scheme]).tensors
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    configs = [(rows, default(rows, 96, 256, scheme, name, kernel)) for rows in (8, 16) for kernel in KERNELS]
    for rows, config in configs:
        for start in range(0, 256, rows):
            x = torch.zeros(rows, 256, dtype=dtype, device=DEVICE)
            x[torch.arange(rows), start + torch.arange(rows)] = 1
            assert torch.equal(run(x, q, config, tensors).T, expected[:, start : start + rows])


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g64_zp", "nvfp4", "mxfp4", "int8_ch", "fp8"])
def test_a_hundred_repeats_are_identical(scheme: str, m: int) -> None:
    q = weights(scheme, 768, 4096)
    x = torch.randn(m, 4096, device=DEVICE).bfloat16()
    tensors = pack(q, LAYOUT[scheme]).tensors
    for config in every_config(scheme, m, 768, 4096)[::3]:
        outs = []
        for _ in range(100):
            out = torch.empty(m, 768, dtype=x.dtype, device=DEVICE)
            decode_launch(config, x, tensors, None, None, False, 768, None, out)
            outs.append(out)
        assert all(torch.equal(out, outs[0]) for out in outs), config


@pytest.mark.parametrize(
    "scheme", ["int4_ch", "int4_ch_zp", "int8_ch", "fp8", "fp8_ch", "fp8_block", "nvfp4", "mxfp4"]
)
def test_any_n_and_k_beside_poison(scheme: str) -> None:
    """K is no multiple of the tile, N is odd, and NaN follows every row of x."""
    step = QuantScheme.parse(scheme).requires_k_multiple
    for n, k in ((33, 129), (50, 77), (257, 1000)):
        k = -(-k // step) * step
        q = weights(scheme, n, k)
        tensors, w = pack(q, LAYOUT[scheme]).tensors, q.dequantize().double()
        for m in (1, 7, 16):
            for shift in (0, 3):
                wide_x = torch.full(
                    (m, -(-k // 8) * 8 + 8), float("nan"), device=DEVICE, dtype=torch.bfloat16
                )
                x = wide_x[:, shift : shift + k]
                x.copy_(torch.randn(m, k, device=DEVICE))
                limit = LIMIT[torch.bfloat16] * (1 + 4 / m**0.5 + 4 / m)
                for kernel in KERNELS:
                    y = run(x, q, default(m, n, k, scheme, kernel=kernel), tensors)
                    assert column_error(y, x, w) < limit, (n, k, m, shift, kernel.name)


@pytest.mark.parametrize("epilogue", ["none", "bias+residual", "bias+residual+silu_mul"])
@pytest.mark.parametrize(
    "scheme",
    [
        "int4_g32",
        "int4_g64",
        "int4_g128",
        "int4_g32_zp",
        "int4_g64_zp",
        "int4_g128_zp",
        "int8_g32",
        "int8_g128",
    ],
)
def test_act_order(scheme: str, epilogue: str) -> None:
    for kernel in WIDE if scheme.startswith("int8") else KERNELS:
        for m in (0, 1, 5, 16):
            problem = OP.problem(f"m={m},n=66,k=384,w={scheme},act_order=true,epilogue={epilogue}")
            outcome = verify(OP, kernel, kernel.config(problem, TARGET), problem, DEVICE)
            assert outcome.ok, (str(problem), kernel.name, outcome)


def test_examples_of_the_operation() -> None:
    for text in OP.examples:
        problem = OP.problem(text)
        for kernel in (*KERNELS, *WIDE):
            if kernel.accepts(problem) is None:
                outcome = verify(OP, kernel, kernel.config(problem, TARGET), problem, DEVICE)
                assert outcome.ok, (text, kernel.name, outcome)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_unaligned_and_strided_x_epilogue_and_nothing(kernel: Kernel) -> None:
    q = weights("int4_g128", 130, 384)
    w, config = q.dequantize().double(), default(16, 130, 384, "int4_g128", kernel=kernel)
    broad = torch.randn(64, 391, device=DEVICE).bfloat16()
    y = torch.cat([run(broad[i : i + 16, 3:387], q, config) for i in range(0, 64, 16)])
    assert column_error(y, broad[:, 3:387], w) < LIMIT[torch.bfloat16]
    x = torch.randn(16, 384, device=DEVICE).bfloat16()
    bias, residual = (
        torch.randn(130, device=DEVICE).bfloat16(),
        torch.randn(16, 130, device=DEVICE).bfloat16(),
    )
    full = run(x, q, config, bias=bias, residual=residual)
    expected = (x.double() @ w.T + bias.double() + residual.double()).float()
    torch.testing.assert_close(full.float(), expected, rtol=8e-3, atol=2e-2)
    assert run(x[:0], q, config).shape == (0, 130)


@pytest.mark.parametrize(
    ("kernel", "scheme"),
    [(kernel, scheme) for kernel in KERNELS for scheme in ("int4_g128", "nvfp4")]
    + [(kernel, "fp8") for kernel in WIDE],
)
def test_a_chain_of_dependent_calls_on_a_side_stream(kernel: Kernel, scheme: str) -> None:
    """Programmatic dependent launch: each call reads what the previous one wrote, and every result is bitwise
    equal to the one with synchronization."""
    q = weights(scheme, 512, 512)
    tensors, config = pack(q, LAYOUT[scheme]).tensors, default(4, 512, 512, scheme, kernel=kernel)
    start = torch.randn(4, 512, device=DEVICE).bfloat16()

    def chain(wait: bool) -> list[torch.Tensor]:
        results = [start]
        for _ in range(50):
            out = torch.empty_like(start)
            decode_launch(config, results[-1], tensors, None, None, False, 512, None, out)
            if wait:
                torch.cuda.synchronize()
            # An elementwise kernel between some calls, so that producers of both kinds occur.
            results.append(
                out * 2.0**-4
                if len(results) % 5
                else (out / out.float().norm().clamp_min(1e-9)).to(out.dtype)
            )
        return results

    expected = chain(wait=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = chain(wait=False)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_two_streams_at_once(kernel: Kernel) -> None:
    """Calls with the same weight that run concurrently share nothing that is written."""
    q = weights("nvfp4", 1024, 2048)
    tensors, config = pack(q, "f4_frag16_v1").tensors, default(8, 1024, 2048, "nvfp4", kernel=kernel)
    xs = [torch.randn(8, 2048, device=DEVICE).bfloat16() for _ in range(2)]
    expected = [run(x, q, config, tensors).clone() for x in xs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for x, stream, outs in zip(xs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                out = torch.full((8, 1024), float("nan"), dtype=x.dtype, device=DEVICE)
                decode_launch(config, x, tensors, None, None, False, 1024, None, out)
                outs.append(out)
    torch.cuda.synchronize()
    for outs, reference in zip(results, expected, strict=True):
        assert all(torch.equal(out, reference) for out in outs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packing_on_the_gpu_is_packing_on_the_cpu(scheme: str) -> None:
    for n, k in ((40, 256), (133, 384), (37, 160)):
        k = (
            -(-k // QuantScheme.parse(scheme).requires_k_multiple)
            * QuantScheme.parse(scheme).requires_k_multiple
        )
        q = quantize(torch.randn(n, k), scheme)
        on_cpu, on_gpu = pack(q, LAYOUT[scheme]), pack(q.to(DEVICE), LAYOUT[scheme])
        assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu.tensors, on_gpu.tensors, strict=True))
        assert unpack(on_gpu).identical(q.to(DEVICE))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_library_refuses_what_it_was_not_built_for(kernel: Kernel) -> None:
    q = weights("int4_g128", 64, 256)
    x = torch.randn(16, 256, device=DEVICE).bfloat16()
    with pytest.raises(ValueError, match="argument out of its range"):
        run(x, q, default(16, 64, 256, "int4_g128", kernel=kernel) | {"rt": 3})
    with pytest.raises(ValueError, match="shape or stride"):
        run(x, q, default(8, 64, 256, "int4_g128", kernel=kernel))
    with pytest.raises(ValueError, match="bytes of tiles"):
        run(x, q, default(16, 64, 256, "nvfp4", kernel=kernel))
    assert check(0, "nothing to raise") is None
