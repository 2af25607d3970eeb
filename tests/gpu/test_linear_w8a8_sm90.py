"""linear_w8a8_sm90 on Hopper: quantizers against their rules, every shape of a CTA against float64, tails, planted faults,
repeated calls, graphs."""

from __future__ import annotations

import math

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernels.linear.w8a8_sm90 import _launch, shapes
from gristmill.kernels.linear.w8a8_sm90.shapes import OPERANDS, Choice, Operands
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
Config = dict[str, int | str]


def weights(scheme: str, n: int, k: int, seed: int = 0) -> QuantTensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    rows = torch.exp(torch.randn(n, 1, device=DEVICE, generator=generator))
    values = torch.randn(n, k, device=DEVICE, generator=generator) * rows
    return quantize(values, QuantScheme.parse(scheme).without_activation)


def every_config(operands: Operands, k: int, grid: int = 132) -> list[Config]:
    """Returns each shape with each number of CTAs that share a tile, over `grid` multiprocessors."""
    choices = []
    for shape in shapes.SHAPES:
        slots = shapes.slots_of(operands, shape, 1)
        if shape.plain:
            choices.append(Choice(shape))
            continue
        for split in (1, 2, 4, 8):
            sums = split * max(1, shape.columns // 8 // split) * shape.rows * 32
            if split <= cdiv(k, 128) and slots * (shape.rows + shape.columns) * 128 >= sums:
                choices.append(Choice(shape, split))
    return [{"format": operands.format, **shapes.config_of(operands, choice, grid)} for choice in choices]


def run(
    x: torch.Tensor,
    config: Config,
    q: QuantTensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    shift: int = 0,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that everything around the result stays untouched.
    shift: elements off 16-byte alignment."""
    m, n = x.shape[0], q.n
    buffer = torch.full(((m + 2) * n + shift,), float("nan"), dtype=x.dtype, device=DEVICE)
    out = buffer[n + shift : n + shift + m * n].view(m, n)
    size = shapes.workspace_bytes(shapes.operands_of(str(config["format"])), m, q.k)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    tensors = pack(q, "plain_v1").tensors
    _launch.launch(config, make_call("linear", x, tensors, bias, residual, False, n, workspace, out))
    assert bool(buffer[: n + shift].isnan().all()) and bool(buffer[n + shift + m * n :].isnan().all())
    return out


class Exact:
    """The product of rows of x and a weight in float64, on the operands as stored."""

    def __init__(self, x: torch.Tensor, q: QuantTensor, operands: Operands) -> None:
        name = operands.schemes[0].partition(".")[2]
        values = quantize_activation(x.cpu(), name).dequantize(torch.float64).to(DEVICE)
        w = q.dequantize().double()
        self.y = values @ w.T
        self.size = values.norm(dim=1, keepdim=True) * w.norm(dim=1) / q.k**0.5

    def error(self, y: torch.Tensor) -> float:
        """The larger one of worst column and worst row of |Δy| / (‖x‖·‖wₙ‖/√K), RMS."""
        delta = ((y.double() - self.y) / self.size).nan_to_num(nan=math.inf).square()
        return float(torch.maximum(delta.mean(0).max(), delta.mean(1).max()).sqrt())


def rows_of(m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    sizes = torch.exp(torch.randn(m, 1, device=DEVICE, generator=generator))
    return (torch.randn(m, k, device=DEVICE, generator=generator) * sizes).to(dtype)


OVER_OPERANDS = pytest.mark.parametrize("operands", OPERANDS, ids=lambda operands: operands.format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@OVER_OPERANDS
def test_quantizers_follow_the_rules_bit_for_bit(operands: Operands, dtype: torch.dtype) -> None:
    name = operands.schemes[0].partition(".")[2]
    for m, k in ((1, 16), (7, 2880), (257, 7168), (3, 20480), (5, 144)):
        x = rows_of(m, k, dtype)
        x[0, :16] = torch.arange(16, device=DEVICE) / 8  # ties
        if m > 2:
            x[1], x[2, 5] = 0, float("nan")
        scratch = torch.full((shapes.workspace_bytes(operands, m, k),), 255, dtype=torch.uint8, device=DEVICE)
        stream = torch.cuda.current_stream().cuda_stream
        quantized = _launch.quantize_rows(operands, x, m, k, scratch, 0, stream)
        start = quantized.scales - quantized.codes
        codes = scratch[: m * k].view(m, k).cpu()
        groups = cdiv(k, 128) if operands.blocks else 1
        scales = scratch[start : start + 4 * quantized.pitch * groups].view(torch.float32)
        scales = scales.view(groups, quantized.pitch)[:, :m].T.cpu()
        expected, on_gpu = quantize_activation(x.cpu(), name), quantize_activation(x, name)
        assert torch.equal(on_gpu.scales.cpu().nan_to_num(), expected.scales.nan_to_num()), (m, k)
        poisoned = expected.scales.isnan()
        assert torch.equal(scales.isnan(), poisoned)
        assert torch.equal(scales.nan_to_num(), expected.scales.nan_to_num()), (m, k)
        whole = ~poisoned.any(1)
        assert torch.equal(codes[whole], expected.values.view(torch.uint8)[whole]), (m, k)
        if operands.sums:
            sums = scratch[start + 4 * quantized.pitch :].view(torch.int32)[:m].cpu()
            assert torch.equal(sums[whole], expected.values.int().sum(1).int()[whole])


@pytest.mark.parametrize(("n", "k"), [(201, 1024), (7, 384), (2112, 2880)])
@OVER_OPERANDS
def test_every_shape_at_257_rows(operands: Operands, n: int, k: int) -> None:
    dtype = torch.float16 if n == 201 else torch.bfloat16
    q, x = weights(operands.schemes[0], n, k), rows_of(257, k, dtype)
    exact = Exact(x, q, operands)
    for grid in (132, 3):  # 3: each CTA processes many tiles
        for config in every_config(operands, k, grid):
            assert exact.error(run(x, config, q)) < 2 * LIMIT[dtype], config


@OVER_OPERANDS
def test_every_number_of_rows(operands: Operands) -> None:
    n, k = 328, 656
    q, all_rows = weights(operands.schemes[0], n, k), rows_of(300, k)
    exact = Exact(all_rows, q, operands)
    for m in (0, 1, 2, 7, 8, 9, 17, 63, 64, 65, 127, 128, 129, 255, 256, 300):
        first = None
        for config in every_config(operands, k, 5):
            y = run(all_rows[:m], config, q)
            if m == 0:
                continue
            delta = ((y.double() - exact.y[:m]) / exact.size[:m]).nan_to_num(nan=math.inf).square()
            assert float(delta.mean(1).max().sqrt()) < 2 * LIMIT[y.dtype], (m, config)
            if (
                config["split"] == 1
            ):  # the same sums in the same order, whatever the tile, as long as it is not cut
                first = y if first is None else first
                assert torch.equal(y, first), (m, config)


@OVER_OPERANDS
def test_positive_operands_of_long_rows(operands: Operands) -> None:
    """Where sums only grow, a tensor core that adds up all of K without float32 sums would be off."""
    q = weights(operands.schemes[0], 256, 16384)
    codes = q.codes & 0x7F if not operands.sums else q.codes | 0x80
    q = q.with_tensors({**q.tensors(), "codes": codes}, q.shape)
    x = rows_of(130, 16384).abs()
    exact = Exact(x, q, operands)
    for config in every_config(operands, 16384):
        worst = float(((run(x, config, q).double() - exact.y) / exact.y).abs().max())
        assert worst < 5e-3, config


@OVER_OPERANDS
def test_planted_faults_show(operands: Operands) -> None:
    """A row's or block's scale doubled, scales shifted, row 64 of a tile replaced, a token doubled."""
    n, k, m = 384, 1024, 200
    scheme = operands.schemes[-1]  # scales by row or block
    q, x = weights(scheme, n, k), rows_of(m, k)
    exact = Exact(x, q, operands)
    assert q.scales is not None
    doubled, codes, other_x = q.scales.clone(), q.codes.clone(), x.clone()
    doubled[1, -1] *= 2
    codes[64] = codes[65]
    other_x[64] *= 2
    faults = [
        (x, q.with_tensors({**q.tensors(), "scales": doubled}, q.shape)),
        (x, q.with_tensors({**q.tensors(), "scales": q.scales.roll(1, 0)}, q.shape)),
        (x, q.with_tensors({**q.tensors(), "codes": codes}, q.shape)),
        (other_x, q),
    ]
    for config in every_config(operands, k)[::4]:
        assert exact.error(run(x, config, q)) < 2 * LIMIT[x.dtype]
        for rows, weight in faults:
            assert exact.error(run(rows, config, weight)) > 0.02, config


def test_blocks_of_a_fused_and_cut_weight() -> None:
    """Rows of a tile, and of a warp, whose blocks end anywhere; more than 32 blocks of K."""
    operands = shapes.operands_of("fp8_block")
    whole = weights("fp8_block.fp8_g128", 640, 4352)
    x = rows_of(140, 4352)
    for start, count in ((64, 500), (200, 321), (127, 258)):
        q = whole.narrow(0, start, count)
        exact = Exact(x, q, operands)
        for config in every_config(operands, 4352, 3)[::2]:
            assert exact.error(run(x, config, q)) < 2 * LIMIT[x.dtype], config


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operands", OPERANDS, ids=lambda operands: operands.format)
def test_scales_of_other_types(operands: Operands, scales: torch.dtype) -> None:
    q = weights(operands.schemes[-1], 200, 272)
    assert q.scales is not None
    q = q.with_tensors({**q.tensors(), "scales": q.scales.to(scales)}, q.shape)
    x = rows_of(70, 272)
    exact = Exact(x, q, operands)
    for config in every_config(operands, 272)[::3]:
        assert exact.error(run(x, config, q)) < 2 * LIMIT[x.dtype], config


@pytest.mark.parametrize(("n", "shift"), [(131, 0), (136, 3)])
@OVER_OPERANDS
def test_epilogues_and_strided_tensors(operands: Operands, n: int, shift: int) -> None:
    q = weights(operands.schemes[0], n, 384)
    padded = rows_of(100, 391)
    bias, residual = rows_of(1, n)[0], rows_of(100, n)
    for x in (padded[:, 3:387], padded[:, :384], torch.cat([padded, padded], 1)[:, :384]):
        exact = Exact(x, q, operands)
        expected = exact.y + bias.double() + residual.double()
        size = exact.size + expected.abs()
        for config in every_config(operands, 384, 2)[::3]:
            assert exact.error(run(x, config, q, shift=shift)) < 2 * LIMIT[x.dtype]
            full = run(x, config, q, bias, residual, shift)
            assert float(((full.double() - expected).abs() / size).max()) < 6e-3, config


@OVER_OPERANDS
def test_silu_mul_follows(operands: Operands) -> None:
    q, x = weights(operands.schemes[0], 256, 256), rows_of(40, 256)
    out = torch.empty(40, 128, dtype=x.dtype, device=DEVICE)
    config = every_config(operands, 256)[2]
    _launch.launch(
        config, make_call("linear", x, pack(q, "plain_v1").tensors, None, None, True, 256, None, out)
    )
    gate, up = Exact(x, q, operands).y.chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert float((out.double() - expected).norm() / expected.norm()) < 8e-3


@OVER_OPERANDS
def test_a_hundred_repeats_are_identical(operands: Operands) -> None:
    for m in (5, 300):
        q, x = weights(operands.schemes[0], 384, 2048), rows_of(m, 2048)
        tensors = pack(q, "plain_v1").tensors
        for config in every_config(operands, 2048, 7)[::3]:
            outs = torch.empty(100, m, 384, dtype=x.dtype, device=DEVICE)
            for out in outs:
                _launch.launch(config, make_call("linear", x, tensors, None, None, False, 384, None, out))
            assert bool((outs == outs[0]).all()), config


@OVER_OPERANDS
def test_a_chain_in_a_graph_reads_what_was_just_written(operands: Operands) -> None:
    """Programmatic dependent launch: each product reads the rows that the one before wrote."""
    q = weights(operands.schemes[0], 512, 512)
    tensors, x = pack(q, "plain_v1").tensors, rows_of(48, 512)
    config = every_config(operands, 512)[2]
    room = torch.empty(shapes.workspace_bytes(operands, 48, 512), dtype=torch.uint8, device=DEVICE)
    steps = [torch.empty_like(x) for _ in range(6)]

    def chain() -> None:
        before = x
        for step in steps:
            _launch.launch(config, make_call("linear", before, tensors, None, None, False, 512, room, step))
            before = step

    chain()
    torch.cuda.synchronize()
    expected = [step.clone() for step in steps]
    for before, step in zip([x, *expected[:-1]], expected, strict=True):
        assert Exact(before, q, operands).error(step) < 2 * LIMIT[x.dtype]
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        chain()
    for _ in range(20):
        for step in steps:
            step.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(step, first) for step, first in zip(steps, expected, strict=True))


def test_offsets_past_two_to_the_31() -> None:
    """W of more than 2 GiB, and y of more than 2^31 elements."""
    operands = shapes.operands_of("fp8")
    k, n, m = 1024, 2_200_000, 1000
    codes = torch.randint(0, 120, (n, k), dtype=torch.uint8, device=DEVICE)
    empty = torch.empty(0, device=DEVICE)
    tensors = [codes, torch.ones(n, 1, device=DEVICE), empty, empty, empty.int(), empty.int()]
    x, out = rows_of(m, k), torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
    config = {"format": "fp8", **shapes.config_of(operands, Choice(shapes.SHAPES[-1]), 132)}
    _launch.launch(config, make_call("linear", x, tensors, None, None, False, n, None, out))
    values = quantize_activation(x[-3:].cpu(), "fp8_token").dequantize(torch.float64).to(DEVICE)
    expected = values @ codes[-5:].view(torch.float8_e4m3fn).double().T
    assert float(((out[-3:, -5:].double() - expected) / expected.abs().mean()).abs().max()) < 0.02


def test_the_wrapped_product_of_torch() -> None:
    kernel, operands = (
        default_registry().kernel("linear", "linear_scaled_mm_torch"),
        shapes.operands_of("fp8"),
    )
    for scheme in operands.schemes:
        for m in (0, 1, 7, 257):
            q, x = weights(scheme, 208, 272), rows_of(m, 272)
            out = torch.empty(m, 208, dtype=x.dtype, device=DEVICE)
            kernel.load()(
                {}, make_call("linear", x, pack(q, "plain_v1").tensors, None, None, False, 208, None, out)
            )
            if m:
                assert Exact(x, q, operands).error(out) < 2 * LIMIT[x.dtype], (scheme, m)
