"""linear_w4a16_sm90 on a Hopper: every instance, split and depth; tails; unaligned x; poisoned and guarded outputs; repeats."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.linear import linear_w4a16_sm90 as spec
from gristmill.kernels.linear import linear_w4a16_wgmma_sm90 as wgmma
from gristmill.quant import QuantTensor, pack, quantize
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def weights(n: int, k: int, seed: int = 0, scales: torch.dtype = torch.bfloat16) -> QuantTensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    w = torch.randn(n, k, device=DEVICE, generator=generator) * torch.exp(
        torch.randn(n, 1, device=DEVICE, generator=generator)
    )
    q = quantize(w, "int4_g128")
    if scales is torch.bfloat16:
        return q
    assert q.scales is not None
    return QuantTensor(q.codes, q.scales.to(scales), q.shape, q.scheme)


def run(
    x: torch.Tensor,
    q: QuantTensor,
    config: dict[str, int],
    tensors: list[torch.Tensor] | None = None,
    **epilogue: torch.Tensor,
) -> torch.Tensor:
    """One call into the middle of a poisoned buffer; the rows around it must stay."""
    m, n = x.shape[0], q.n
    buffer = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device=DEVICE)
    tensors = tensors or pack(q, "w4_frag16_v1").tensors
    launch = wgmma.launch if "rb" in config else spec.launch
    launch(config, x, tensors, epilogue.get("bias"), epilogue.get("residual"), False, n, None, buffer[1 : m + 1])
    assert bool(buffer[0].isnan().all()) and bool(buffer[m + 1].isnan().all())
    return buffer[1 : m + 1]


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """|Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over the rows of x, of the worst column."""
    reference = x.double() @ w.T
    scale = x.double().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.double() - reference) / scale).square().mean(0).sqrt().max())


def every_config(m: int, n: int, k: int) -> list[dict[str, int]]:
    small = [spec._config(*found[:3]) for found in spec.candidates(m, n, k) if found[2] in (1, 3)] if m <= 16 else []
    return small + [wgmma._config(*found[:3]) for found in wgmma.candidates(m, n, k) if found[2] in (2, 4)]


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(1000, 1536), (200, 1024), (17, 384)])
def test_every_instance(n: int, k: int, m: int, dtype: torch.dtype, scales: torch.dtype) -> None:
    q = weights(n, k, scales=scales)
    w, tensors = q.dequantize().double(), pack(q, "w4_frag16_v1").tensors
    rows = max(m, 64 // m * m)  # a column's RMS needs many rows
    x = torch.randn(rows, k, device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(m)).to(dtype)
    for config in every_config(m, n, k):
        y = torch.cat([run(x[i : i + m], q, config, tensors) for i in range(0, rows, m)])
        assert column_error(y, x, w) < LIMIT[dtype], config


def test_a_doubled_block_scale_would_show() -> None:
    q = weights(64, 512)
    x = torch.randn(32, 512, device=DEVICE).bfloat16()
    config = dict(wgmma.config(OP.problem("m=32,n=64,k=512,w=int4_g128"), _target()))
    assert q.scales is not None
    wrong = QuantTensor(q.codes, q.scales.clone(), q.shape, q.scheme)
    assert wrong.scales is not None
    wrong.scales[5, 2] *= 2
    assert column_error(run(x, wrong, config), x, q.dequantize().double()) > 10 * LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_hot_gives_the_weight_rounded_once(dtype: torch.dtype) -> None:
    q = weights(96, 256, scales=dtype)
    expected = q.dequantize().to(dtype)
    for rows, module in ((16, spec), (32, wgmma)):
        config = dict(module.config(OP.problem(f"m={rows},n=96,k=256,w=int4_g128"), _target()))
        for start in range(0, 256, rows):
            x = torch.zeros(rows, 256, dtype=dtype, device=DEVICE)
            x[torch.arange(rows), start + torch.arange(rows)] = 1
            assert torch.equal(run(x, q, config).T, expected[:, start : start + rows])


@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
def test_a_hundred_repeats_are_identical(m: int) -> None:
    q = weights(768, 4096)
    x = torch.randn(m, 4096, device=DEVICE).bfloat16()
    tensors = pack(q, "w4_frag16_v1").tensors
    for config in every_config(m, 768, 4096)[::3]:
        outs = []
        for _ in range(100):
            out = torch.empty(m, 768, dtype=x.dtype, device=DEVICE)
            launch = wgmma.launch if "rb" in config else spec.launch
            launch(config, x, tensors, None, None, False, 768, None, out)
            outs.append(out)
        assert all(torch.equal(out, outs[0]) for out in outs), config


def test_unaligned_and_strided_x_epilogue_and_nothing() -> None:
    q = weights(130, 384)
    w = q.dequantize().double()
    config = dict(spec.config(OP.problem("m=16,n=130,k=384,w=int4_g128"), _target()))
    wide = torch.randn(64, 391, device=DEVICE).bfloat16()
    y = torch.cat([run(wide[i : i + 16, 3:387], q, config) for i in range(0, 64, 16)])
    assert column_error(y, wide[:, 3:387], w) < LIMIT[torch.bfloat16]
    x = torch.randn(16, 384, device=DEVICE).bfloat16()
    bias, residual = torch.randn(130, device=DEVICE).bfloat16(), torch.randn(16, 130, device=DEVICE).bfloat16()
    full = run(x, q, config, bias=bias, residual=residual)
    expected = (x.double() @ w.T + bias.double() + residual.double()).float()
    torch.testing.assert_close(full.float(), expected, rtol=8e-3, atol=2e-2)
    assert run(x[:0], q, config).shape == (0, 130)


@pytest.mark.parametrize("m", [65, 130, 256])
def test_more_rows_than_a_launch_takes(m: int) -> None:
    q = weights(200, 512)
    config = dict(wgmma.config(OP.problem(f"m={m},n=200,k=512,w=int4_g128"), _target()))
    x = torch.randn(m, 512, device=DEVICE).bfloat16()
    assert column_error(run(x, q, config), x, q.dequantize().double()) < LIMIT[torch.bfloat16]


def test_a_chain_of_dependent_calls_on_a_side_stream() -> None:
    """Programmatic dependent launch: each call reads what the one before wrote."""
    q = weights(512, 512)
    w = q.dequantize().double()
    tensors = pack(q, "w4_frag16_v1").tensors
    config = dict(spec.config(OP.problem("m=4,n=512,k=512,w=int4_g128"), _target()))
    stream = torch.cuda.Stream()
    x = torch.randn(4, 512, device=DEVICE).bfloat16()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain = [x]
        for _ in range(50):
            out = torch.empty_like(x)
            spec.launch(config, chain[-1], tensors, None, None, False, 512, None, out)
            chain.append(
                (out / out.float().norm(dim=1, keepdim=True).to(out.dtype)) if len(chain) % 5 == 0 else out * 0.01
            )
    stream.synchronize()
    for before, after in zip(chain, chain[1:], strict=False):
        y = before.double() @ w.T
        cosine = torch.nn.functional.cosine_similarity(y, after.double())
        assert bool((cosine > 0.9999).all())


def test_the_library_refuses_what_it_was_not_built_for() -> None:
    q = weights(64, 256)
    x = torch.randn(16, 256, device=DEVICE).bfloat16()
    good = dict(spec.config(OP.problem("m=16,n=64,k=256,w=int4_g128"), _target()))
    with pytest.raises(ValueError, match="argument out of its range"):
        run(x, q, good | {"rt": 5})
    with pytest.raises(ValueError, match="shape or stride"):
        run(x, q, dict(spec.config(OP.problem("m=8,n=64,k=256,w=int4_g128"), _target())))


def _target() -> object:
    from gristmill.autotune.device import device_target
    from gristmill.kernel_registry.policy import Policy

    return device_target(DEVICE, Policy())
