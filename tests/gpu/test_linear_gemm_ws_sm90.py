"""gemm_ws over frag16 tiles on Hopper: every scheme, instance and split, tails, epilogues, repeated calls,
streams."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.frag16_sm90 import gemm_ws
from gristmill.kernels.linear.frag16_sm90._launch_gemm_ws import launch as launch_gemm_ws
from gristmill.kernels.linear.op import gated, gated_error
from gristmill.quant import QuantTensor, pack, quantize
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w4a16_gemm_ws_sm90")
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
INT4 = tuple(f"int4_{group}{zero}" for zero in ("", "_zp") for group in ("g32", "g64", "g128", "ch"))
SCHEMES = (*INT4, "mxfp4", "nvfp4", "int8_ch", "int8_g32", "int8_g128", "fp8", "fp8_ch", "fp8_block")
SCALES = {scheme: (torch.bfloat16, torch.float16) for scheme in SCHEMES if scheme.startswith("int")}
Config = dict[str, int | str]


def weights(
    scheme: str,
    n: int,
    k: int,
    seed: int = 0,
    scales: torch.dtype | None = None,
    g_idx: torch.Tensor | None = None,
) -> QuantTensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    rows = torch.exp(torch.randn(n, 1, device=DEVICE, generator=generator))
    q = quantize(torch.randn(n, k, device=DEVICE, generator=generator) * rows, scheme, g_idx=g_idx)
    if scales is None or q.scales is None or q.scales.dtype == scales:
        return q
    return QuantTensor(q.codes, q.scales.to(scales), q.shape, q.scheme, zero=q.zero, g_idx=q.g_idx)


def packed(q: QuantTensor) -> list[torch.Tensor]:
    registry = default_registry()
    names = (f"{kind}_frag16_v1" for kind in ("w4", "f4", "w8"))
    return list(pack(q, next(name for name in names if registry.layout(name).accepts(str(q.scheme)))).tensors)


def every_config(scheme: str, m: int, k: int, grid: int = 132) -> list[Config]:
    """Returns each instance with each split-K, with stream-K over `grid` and `grid` + 1 CTAs, and with each lag
    between the halves of a CTA's warpgroups."""
    form, configs, groups = gemm_ws.SCHEDULE.format_of(QuantScheme.parse(scheme)), [], -(-k // 128)
    assert form is not None
    for shape in gemm_ws.shapes_of(form):
        partitions = [
            gemm_ws.Partition(split, 0, grid)
            for split in (1, 2, 4, 8)
            if shape.mt // 8 // shape.slices % split == 0 and groups // split >= shape.slices
        ]
        if shape.slices == 1:
            partitions += [gemm_ws.Partition(1, even, ctas) for even in (1, 2) for ctas in (grid, grid + 1)]
            partitions += [
                gemm_ws.Partition(1, even, grid, lag)
                for even in (0, 1, 2)
                for lag in gemm_ws.lags_of(form, shape)
            ]
        # Bands as for a weight that L2 does not hold.
        configs += [
            gemm_ws.config_of(form, shape, partition, max(m, 1), 1 << 20, k) for partition in partitions
        ]
    return [{"format": form.name, "tile_bytes": form.tile_bytes, **one} for one in configs]


def default(scheme: str, m: int, n: int, k: int) -> Config:
    from gristmill.autotune.device import device_target
    from gristmill.kernel_registry.policy import Policy

    return dict(KERNEL.config(OP.problem(f"m={m},n={n},k={k},w={scheme}"), device_target(DEVICE, Policy())))


def run(
    x: torch.Tensor,
    n: int,
    config: Config,
    tensors: list[torch.Tensor],
    shift: int = 0,
    **epilogue: torch.Tensor,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that everything around the
    result stays untouched. shift: elements off 16-byte alignment."""
    m = x.shape[0]
    buffer = torch.full(((m + 2) * n + shift,), float("nan"), dtype=x.dtype, device=DEVICE)
    out = buffer[n + shift : n + shift + m * n].view(m, n)
    launch_gemm_ws(
        config,
        make_call("linear", x, tensors, epilogue.get("bias"), epilogue.get("residual"), False, n, None, out),
    )
    assert bool(buffer[: n + shift].isnan().all()) and bool(buffer[n + shift + m * n :].isnan().all())
    return out


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Error of the worst column: |Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over the rows of x."""
    reference = x.double() @ w.T
    scale = x.double().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.double() - reference) / scale).square().mean(0).sqrt().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_instance_at_257_rows(scheme: str, dtype: torch.dtype) -> None:
    for scales in SCALES.get(scheme, (None,)):
        for n, k in ((1000, 1536), (201, 1024), (17, 384)):
            q = weights(scheme, n, k, scales=scales)
            w, tensors = q.dequantize().double(), packed(q)
            x = torch.randn(
                257, k, device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(1)
            ).to(dtype)
            for grid in (132, 3):  # 3: each CTA processes many tiles
                for config in every_config(scheme, 257, k, grid):
                    error = column_error(run(x, n, config, tensors), x, w)
                    assert error < LIMIT[dtype], (error, scales, n, k, config)


@pytest.mark.parametrize(
    "m", [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 1000]
)
@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4"])
def test_every_number_of_rows(scheme: str, m: int) -> None:
    n, k = 328, 640
    q = weights(scheme, n, k, seed=m)
    w, tensors = q.dequantize().double(), packed(q)
    x = torch.randn(m, k, device=DEVICE).bfloat16()
    reference = x.double() @ w.T
    for config in every_config(scheme, m, k, 5):
        y = run(x, n, config, tensors)
        assert float((y.double() - reference).norm() / reference.norm()) < 4e-3, config
        if not config["even"]:  # the other rows of the batch change nothing
            assert torch.equal(y[:1], run(x[:1], n, config, tensors)), config


@pytest.mark.parametrize(
    ("scheme", "k"),
    [
        ("int4_ch", 200),
        ("int4_ch_zp", 129),
        ("int4_g32", 160),
        ("mxfp4", 96),
        ("nvfp4", 208),
        ("int8_ch", 77),
        ("fp8_ch", 330),
        ("fp8_block", 330),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_columns_past_the_last_tile(scheme: str, k: int, dtype: torch.dtype) -> None:
    """K is no multiple of the tile, and NaN follows each row of x."""
    q = weights(scheme, 50, k)
    padded = torch.full((70, k + 9), float("nan"), dtype=dtype, device=DEVICE)
    padded[:, :k] = torch.randn(70, k, device=DEVICE).to(dtype)
    for x in (padded[:, :k], padded[:, :k].contiguous()):
        for config in every_config(scheme, 70, k, 4):
            assert (
                column_error(run(x, 50, config, packed(q)), x, q.dequantize().double()) < LIMIT[dtype] * 1.6
            ), config


def test_act_order() -> None:
    k = 512
    g_idx = (torch.arange(k, device=DEVICE) // 64)[torch.randperm(k, device=DEVICE)].int()
    q = weights("int4_g64_zp", 96, k, g_idx=g_idx)
    x = torch.randn(257, k, device=DEVICE).bfloat16()
    assert (
        column_error(run(x, 96, default("int4_g64_zp", 257, 96, k), packed(q)), x, q.dequantize().double())
        < 6e-3
    )


@pytest.mark.parametrize(
    "scheme", ["int4_g128", "int4_g32_zp", "mxfp4", "nvfp4", "int8_g32", "int8_g128", "fp8_block"]
)
def test_a_doubled_block_scale_would_show(scheme: str) -> None:
    q = weights(scheme, 256, 512)
    x = torch.randn(257, 512, device=DEVICE).bfloat16()
    assert q.scales is not None
    changed = q.scales.clone()
    if scheme == "mxfp4":
        changed[1, 2] += 1
    else:
        changed[1, 2] = (changed[1, 2].float() / 2).to(changed.dtype)
    corrupted = QuantTensor(q.codes, changed, q.shape, q.scheme, zero=q.zero, global_scale=q.global_scale)
    assert (
        column_error(
            run(x, 256, default(scheme, 257, 256, 512), packed(corrupted)), x, q.dequantize().double()
        )
        > 0.02
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_hot_gives_the_weight_rounded_once(scheme: str, dtype: torch.dtype) -> None:
    x = torch.eye(256, dtype=dtype, device=DEVICE)
    for scales in SCALES.get(scheme, (None,)):
        q = weights(scheme, 96, 256, scales=scales)
        expected, tensors = q.dequantize().to(dtype), packed(q)
        for config in every_config(scheme, 256, 256):
            assert torch.equal(run(x, 96, config, tensors).T, expected), (scales, config)


@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4", "int8_ch"])
@pytest.mark.parametrize("m", [32, 64, 128, 300])
def test_a_hundred_repeats_are_identical(scheme: str, m: int) -> None:
    tensors = packed(weights(scheme, 768, 4096))
    x = torch.randn(m, 4096, device=DEVICE).bfloat16()
    for config in every_config(scheme, m, 4096, 7)[::2] + every_config(scheme, m, 4096, 132):
        outs = torch.empty(100, m, 768, dtype=x.dtype, device=DEVICE)
        for out in outs:
            launch_gemm_ws(config, make_call("linear", x, tensors, None, None, False, 768, None, out))
        assert bool((outs == outs[0]).all()), config


@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4"])
@pytest.mark.parametrize(("n", "shift"), [(136, 0), (131, 0), (136, 3)])
def test_epilogues_and_unaligned_tensors(scheme: str, n: int, shift: int) -> None:
    q = weights(scheme, n, 384)
    w, tensors = q.dequantize().double(), packed(q)
    padded = torch.randn(100, 391, device=DEVICE).bfloat16()
    x = padded[:, 3:387]
    bias = torch.randn(n, device=DEVICE).bfloat16()
    residual = torch.randn(100, n, device=DEVICE).bfloat16()
    for config in every_config(scheme, 100, 384, 2):
        assert column_error(run(x, n, config, tensors, shift), x, w) < LIMIT[torch.bfloat16]
        full = run(x, n, config, tensors, shift, bias=bias, residual=residual)
        # Bias or residual of the wrong row of W would give an error near 0.1 in the columns of small weights.
        assert (
            column_error(full.double() - bias.double() - residual.double(), x, w) < 2 * LIMIT[torch.bfloat16]
        ), config
    assert run(x[:0], n, default(scheme, 1, n, 384), tensors).shape == (0, n)


def test_the_workspace_is_left_as_it_was_found() -> None:
    q = weights("int4_g128", 520, 2048)
    w, tensors = q.dequantize().double(), packed(q)
    x = torch.randn(200, 2048, device=DEVICE).bfloat16()
    for grid in (11, 132):
        for config in every_config("int4_g128", 200, 2048, grid):
            if not config["even"]:
                continue
            space = torch.full((gemm_ws.workspace_bytes(config),), 255, dtype=torch.uint8, device=DEVICE)
            flags = space[: gemm_ws.FLAG_BYTES].zero_()
            out = torch.empty(5, 200, 520, dtype=x.dtype, device=DEVICE)
            for y in out:
                launch_gemm_ws(config, make_call("linear", x, tensors, None, None, False, 520, space, y))
            assert column_error(out[0], x, w) < LIMIT[torch.bfloat16], config
            assert bool((out == out[0]).all()) and not bool(flags.any()), config
    dealt = next(one for one in every_config("int4_g128", 200, 2048) if one["even"])
    space = torch.zeros(gemm_ws.workspace_bytes(dealt), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="workspace must be"):
        launch_gemm_ws(dealt, make_call("linear", x, tensors, None, None, False, 520, space[:-1], out[0]))


def gated_run(
    x: torch.Tensor,
    n: int,
    config: Config,
    tensors: list[torch.Tensor],
    shift: int = 0,
    **epilogue: torch.Tensor,
) -> torch.Tensor:
    """`run` of silu(gate) * up of n rows of W."""
    m, columns = x.shape[0], n // 2
    buffer = torch.full(((m + 2) * columns + shift,), float("nan"), dtype=x.dtype, device=DEVICE)
    out = buffer[columns + shift : columns + shift + m * columns].view(m, columns)
    bias, residual = epilogue.get("bias"), epilogue.get("residual")
    launch_gemm_ws(config, make_call("linear", x, tensors, bias, residual, True, n, None, out))
    around = buffer[: columns + shift], buffer[columns + shift + m * columns :]
    assert all(bool(part.isnan().all()) for part in around)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "mxfp4", "nvfp4", "int8_g128", "fp8_block"])
@pytest.mark.parametrize(("n", "k"), [(64, 640), (320, 1536), (512, 1024), (200, 1024)])
def test_gate_and_up(scheme: str, dtype: torch.dtype, n: int, k: int) -> None:
    """In the epilogue, with blocks of 32 rows of up that begin within those of 64 and that do not; of 200 rows in a launch of its own."""
    q = weights(scheme, n, k)
    w, tensors = q.dequantize().double(), packed(q)
    generator = torch.Generator(device=DEVICE).manual_seed(2)
    x, bias, residual = (
        torch.randn(*size, device=DEVICE, generator=generator) for size in ((257, k), (n,), (257, n // 2))
    )
    # fp16 has no products of gates and ups that are as large as these rows of W make them.
    x, bias, residual = (x / k**0.5).to(dtype), bias.to(dtype), residual.to(dtype)
    z = x.double() @ w.T
    size = x.double().norm(dim=1, keepdim=True) * w.norm(dim=1) / k**0.5
    for grid in (132, 3):
        for number, config in enumerate(every_config(scheme, 257, k, grid)):
            for epilogue in ({}, {"bias": bias}, {"bias": bias, "residual": residual}):
                with_bias = z + epilogue["bias"].double() if epilogue else z
                expected, sizes = gated(with_bias), gated_error(with_bias, size + bias.double().abs())
                if "residual" in epilogue:
                    expected, sizes = expected + residual.double(), sizes + residual.double().abs()
                y = gated_run(x, n, config, tensors, number % 2 * 3, **epilogue)
                error = ((y.double() - expected) / sizes).square().mean(0).sqrt().max()
                assert float(error) < 1.5 * LIMIT[dtype], (float(error), config, list(epilogue))


@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4"])
def test_gate_and_up_of_a_row_do_not_depend_on_others(scheme: str) -> None:
    tensors = packed(weights(scheme, 1024, 1024))
    x = torch.randn(300, 1024, device=DEVICE).bfloat16()
    for config in every_config(scheme, 300, 1024, 7):
        outs = [gated_run(x, 1024, config, tensors) for _ in range(20)]
        assert all(torch.equal(out, outs[0]) for out in outs), config
        if not config["even"]:
            for m in (1, 8, 65, 256):
                assert torch.equal(outs[0][:m], gated_run(x[:m], 1024, config, tensors)), (m, config)


def test_large_gates() -> None:
    """Sigmoids of nearly 0 and of 1, whose reciprocals do not overflow."""
    q = weights("int4_g128", 256, 256)
    x = 100 * torch.randn(65, 256, device=DEVICE).bfloat16()
    w = q.dequantize().bfloat16().double()
    expected = gated(x.double() @ w.T)
    for config in every_config("int4_g128", 65, 256):
        y = gated_run(x, 256, config, packed(q))
        assert bool(y.isfinite().all()), config
        assert float((y.double() - expected).norm() / expected.norm()) < 6e-3, config


@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4"])
def test_a_chain_of_dependent_calls_on_two_streams(scheme: str) -> None:
    """Programmatic dependent launch: each call reads what the previous one wrote, in two concurrent chains."""
    q = weights(scheme, 512, 512)
    w, tensors = q.dequantize().double(), packed(q)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    starts = [torch.randn(m, 512, device=DEVICE).bfloat16() for m in (48, 200)]
    chains = [[x] for x in starts]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, chain in zip(streams, chains, strict=True):
            with torch.cuda.stream(stream):
                out = torch.empty_like(chain[-1])
                config = default(scheme, out.shape[0], 512, 512)
                launch_gemm_ws(
                    config, make_call("linear", chain[-1], tensors, None, None, False, 512, None, out)
                )
                second = torch.empty_like(out)  # the next launch follows directly
                launch_gemm_ws(
                    config, make_call("linear", out, tensors, None, None, False, 512, None, second)
                )
                chain += [out, second / second.float().norm(dim=1, keepdim=True).to(second.dtype)]
    torch.cuda.synchronize()
    for chain in chains:
        for before, after in zip(chain, chain[1:], strict=False):
            cosine = torch.nn.functional.cosine_similarity(before.double() @ w.T, after.double())
            assert bool((cosine > 0.9999).all())


def test_the_library_refuses_what_it_was_not_built_for() -> None:
    q = weights("int4_g128", 64, 256)
    x = torch.randn(16, 256, device=DEVICE).bfloat16()
    config, tensors = default("int4_g128", 16, 64, 256), packed(q)
    for invalid in (
        {"mt": 48},
        {"c": 3},
        {"slices": 3},
        {"ctas": 3},
        {"split": 3},
        {"grid": 0},
        {"raster": 0},
    ):
        with pytest.raises(ValueError, match="argument out of its range"):
            run(x, 64, config | invalid, tensors)
    with pytest.raises(ValueError, match="bytes of tiles"):
        run(x, 64, config, [torch.empty(7, dtype=torch.uint8, device=DEVICE), *tensors[1:]])
