"""moe_w8a8_sm90 on Hopper: quantizers by their rules, every shape of a CTA against float64, routings, planted faults, graphs."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.device import device_target
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernels.linear.w8a8_sm90.shapes import Operands
from gristmill.kernels.moe.moe import op as moe_op
from gristmill.kernels.moe.moe.w8a8_sm90 import _launch, shapes
from gristmill.kernels.moe.moe.w8a8_sm90 import spec as moe_w8a8_sm90
from gristmill.kernels.moe.permute.op import reference as permute
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.gpu.test_moe_sm90 import DEFAULTS, DEVICE, HOPPER, ROUTINGS, SILU, offsets_of, routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
OVER_OPERANDS = pytest.mark.parametrize("operands", shapes.OPERANDS, ids=lambda operands: operands.format)


def weights(operands: Operands, experts: int, n: int, k: int, seed: int = 0) -> QuantTensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = torch.randn(experts, n, 1, device=DEVICE, generator=generator).exp()
    values = torch.randn(experts, n, k, device=DEVICE, generator=generator) * rows
    return quantize(values, QuantScheme.parse(operands.schemes[-1]).without_activation)


def form_of(operands: Operands) -> str:
    return operands.schemes[0].partition(".")[2]


def sorted_operands(
    operands: Operands, x: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of sorted rows as the product reads them, by the reference's rules; NaN where nothing belongs."""
    quantized, (rows, k) = quantize_activation(x, form_of(operands)), x.shape
    codes = quantized.values.view(torch.uint8).contiguous()
    if not operands.blocks:
        return codes, quantized.scales.flatten().contiguous()
    scales = torch.full(
        (cdiv(k, 128), shapes.scale_pitch(operands, rows, len(counts))), math.nan, device=DEVICE
    )
    start = 0
    for e, count in enumerate(counts):
        column = cdiv(start, 4) * 4 + 4 * e
        scales[:, column : column + count] = quantized.scales[start : start + count].T
        start += count
    return codes, scales


def exact(
    operands: Operands, x: torch.Tensor, q: QuantTensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64 on the operands as stored, and the size of each sum."""
    values = quantize_activation(x, form_of(operands)).dequantize().double()
    start, outs, sizes = 0, [], []
    for expert, count in zip(q.experts(), counts, strict=True):
        part, w = values[start : start + count], expert.dequantize().double()
        start += count
        outs.append(part @ w.T)
        sizes.append(part.norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5)
    return torch.cat(outs), torch.cat(sizes)


def worst(y: torch.Tensor, ref: torch.Tensor, size: torch.Tensor) -> float:
    """The larger one of worst column and worst row, RMS; infinity if a number is NaN."""
    if not y.numel():
        return 0.0
    delta = ((y.double() - ref) / size).nan_to_num(nan=math.inf).square()
    return float(torch.maximum(delta.mean(0).max(), delta.mean(1).max()).sqrt())


def run(
    operands: Operands,
    choice: shapes.Choice,
    x: torch.Tensor,
    q: QuantTensor,
    counts: list[int],
    processors: int = 132,
) -> torch.Tensor:
    """One product into the middle of a poisoned buffer; what surrounds the result stays untouched."""
    rows = x.shape[0]
    buffer = torch.full((rows + 2, q.n), math.nan, dtype=x.dtype, device=DEVICE)
    codes, scales = sorted_operands(operands, x, counts)
    config = shapes.config_of(operands, choice, len(counts), processors)
    _launch.product(
        operands, config, codes, scales, list(pack(q, "plain_v1").tensors), offsets_of(counts), buffer[1:-1]
    )
    assert bool(buffer[0].isnan().all()) and bool(buffer[sum(counts) + 1 :].isnan().all())
    return buffer[1 : 1 + sum(counts)]


COUNTS = [3, 0, 70, 1, 183, 8, 0, 257]


@OVER_OPERANDS
@pytest.mark.parametrize(("n", "k"), [(512, 640), (201, 1024), (136, 2880), (80, 48)])
def test_every_shape(operands: Operands, n: int, k: int) -> None:
    dtype = torch.float16 if n == 201 else torch.bfloat16
    q = weights(operands, len(COUNTS), n, k)
    x = (torch.randn(sum(COUNTS) + 5, k, device=DEVICE) * (0.1 if n == 201 else 1)).to(dtype)
    ref, size = exact(operands, x, q, COUNTS)
    for choice in shapes.choices():
        for processors in (132, 1):  # 1: each CTA has many tiles
            y = run(operands, choice, x, q, COUNTS, processors)
            assert worst(y, ref, size) < 2 * LIMIT[dtype], (choice, processors)


@OVER_OPERANDS
@pytest.mark.parametrize("counts", [[0, 0, 257], [257, 0, 0], [1, 0, 1], [7, 8, 9], [0, 0, 0], [64, 128, 65]])
def test_rows_per_expert_have_the_same_bits_in_every_shape(operands: Operands, counts: list[int]) -> None:
    q, x = weights(operands, 3, 256, 640), torch.randn(sum(counts) + 1, 640, device=DEVICE).bfloat16()
    ref, size = exact(operands, x, q, counts)
    first = None
    for choice in shapes.choices():
        y = run(operands, choice, x, q, counts)
        first = y if first is None else first
        assert worst(y, ref, size) < 2 * LIMIT[x.dtype] and torch.equal(y, first), choice


@OVER_OPERANDS
def test_one_hot_rows_read_every_weight_back(operands: Operands) -> None:
    """A row of one number reads a column of W: a wrong row, column or scale is a wrong number."""
    k, counts = 272, [272, 0, 272]
    q = weights(operands, 3, 200, k)
    x = torch.eye(k, device=DEVICE).repeat(2, 1).bfloat16() * 448
    dense = [expert.dequantize().T * 448 for expert in q.experts()]
    expected = torch.cat([dense[0], dense[2]]).bfloat16()
    for choice in shapes.choices():
        y = run(operands, choice, x, q, counts)
        torch.testing.assert_close(y, expected, rtol=8e-3, atol=0)


@OVER_OPERANDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantizers_follow_the_rules(operands: Operands, dtype: torch.dtype) -> None:
    """Tokens bit for bit; silu(gate) * up but for neighbours of a rounding."""
    experts, top_k = 6, 3
    for tokens, k in ((1, 16), (7, 2880), (130, 768), (3, 20480)):
        ids = routing("foreign", tokens, top_k, experts)
        offsets, _, inverse = permute(ids, experts)
        order, entries = _launch.Sorted(ids, offsets, inverse), tokens * top_k
        x = torch.randn(tokens, k, device=DEVICE).to(dtype)
        if tokens > 1:
            x[1] = 0
        z = torch.randn(entries, 2 * k, device=DEVICE).to(dtype)
        gate, up = z.float().chunk(2, 1)
        acts = (gate * gate.sigmoid() * up).to(dtype)
        places, rows = inverse[inverse >= 0].long(), torch.arange(entries, device=DEVICE)[inverse >= 0]
        for gated, source in ((False, x), (True, z)):
            codes = torch.full((entries, k), 255, dtype=torch.uint8, device=DEVICE)
            room = torch.full(
                (shapes.scale_bytes(operands, entries, experts, k) // 4,), math.nan, device=DEVICE
            )
            _launch.quantize(operands, source, order, k, codes, room, gated=gated)
            expected = quantize_activation(acts[places] if gated else x[rows // top_k], form_of(operands))
            exponent = codes[places].view(torch.float8_e4m3fn).float()
            if operands.blocks:
                start = offsets[ids.flatten()[rows].long()].long()
                columns = (start + 3) // 4 * 4 + 4 * ids.flatten()[rows].long() + places - start
                scales = room.view(cdiv(k, 128), -1)[:, columns].T
            else:
                scales = room[places, None]
            if gated:
                torch.testing.assert_close(scales, expected.scales, rtol=8e-3, atol=1e-6)
                differ = exponent != expected.values.float()
                assert float(differ.float().mean()) < 2e-2
                torch.testing.assert_close(exponent, expected.values.float(), rtol=0.15, atol=2**-8)
            else:
                assert torch.equal(scales, expected.scales) and torch.equal(exponent, expected.values.float())


def layer(
    scheme: str, experts: int = 6, hidden: int = 256, inner: int = 208
) -> tuple[QuantTensor, QuantTensor]:
    first = quantize(torch.randn(experts, 2 * inner, hidden, device=DEVICE) * hidden**-0.5, scheme)
    return first, quantize(torch.randn(experts, hidden, inner, device=DEVICE) * inner**-0.5, scheme)


def packed(q: QuantTensor) -> list[torch.Tensor]:
    return list(pack(q, "plain_v1").tensors)


def moe(arguments: list, problem: Problem, workspace: torch.Tensor | None = None) -> torch.Tensor:
    x, scores, ids, first, second, inner, *_ = arguments
    config = moe_w8a8_sm90.config(problem, device_target(DEVICE, Policy()))
    out = torch.full_like(x, math.nan)
    if workspace is None:
        size = moe_w8a8_sm90.workspace(problem, config).bytes
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    moe_w8a8_sm90.launch(
        config, make_call("moe", x, scores, ids, packed(first), packed(second), inner, workspace, *SILU, out)
    )
    return out


@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 257])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_against_the_reference(kind: str, tokens: int) -> None:
    for scheme in shapes.SCHEMES:
        first, second = layer(scheme)
        x = torch.randn(tokens, 264, device=DEVICE).bfloat16()[:, :256]  # strided
        scores, ids = torch.rand(tokens, 3, device=DEVICE) + 0.1, routing(kind, tokens, 3, 6)
        problem = moe_op.OP.problem(f"m={tokens},top_k=3,e=6,h=256,i=208,w={scheme}")
        arguments = [x, scores, ids, first, second, 208, None, *SILU]
        out = moe(arguments, problem)
        ref = moe_op.reference(x, scores, ids, first, second)
        assert (
            moe_op.error(problem, [*arguments, *DEFAULTS], [out], [ref]) <= moe_op.tolerance(problem).limit
        ), scheme
        if kind == "foreign":
            assert bool((out[ids[:, 1] < 0] == 0).all())


FAULTS = ("experts swapped", "a block scale doubled", "gate and up swapped", "a weight of another token")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    """The bound of the test above would notice each of these."""
    scheme = "fp8_block.fp8_g128"
    first, second = layer(scheme, inner=384)
    x, scores = torch.randn(64, 256, device=DEVICE).bfloat16(), torch.rand(64, 3, device=DEVICE) + 0.1
    ids = routing("skewed", 64, 3, 6)
    problem = moe_op.OP.problem(f"m=64,top_k=3,e=6,h=256,i=384,w={scheme}")
    ref = moe_op.reference(x, scores, ids, first, second)
    assert first.scales is not None and second.scales is not None
    codes, scales, given, down = (
        first.codes.clone(),
        first.scales.clone(),
        scores.clone(),
        second.scales.clone(),
    )
    if fault == "experts swapped":
        codes[[0, 1]] = codes[[1, 0]]
    elif fault == "a block scale doubled":
        down[5, 1, 2] *= 2
    elif fault == "gate and up swapped":
        codes = codes.roll(384, dims=1)
    else:
        given[0], given[1] = scores[1], scores[0]
    wrong = first.with_tensors({**first.tensors(), "codes": codes, "scales": scales}, first.shape)
    other = second.with_tensors({**second.tensors(), "scales": down}, second.shape)
    out = moe([x, given, ids, wrong, other, 384, None], problem)
    error = moe_op.error(problem, [x, scores, ids, first, second, 384, None, *SILU, *DEFAULTS], [out], [ref])
    assert error > moe_op.tolerance(problem).limit


def test_launches_repeat_bit_for_bit_and_a_graph_takes_other_ids() -> None:
    scheme = "fp8_block.fp8_g128"
    first, second = layer(scheme)
    for tokens in (2, 50, 600):
        problem = moe_op.OP.problem(f"m={tokens},top_k=3,e=6,h=256,i=208,w={scheme}")
        x, scores = torch.randn(tokens, 256, device=DEVICE).bfloat16(), torch.rand(tokens, 3, device=DEVICE)
        ids, out = routing("all to one", tokens, 3, 6), torch.empty_like(x)
        config = moe_w8a8_sm90.config(problem, device_target(DEVICE, Policy()))
        space = torch.empty(moe_w8a8_sm90.workspace(problem, config).bytes, dtype=torch.uint8, device=DEVICE)
        w13, w2 = packed(first), packed(second)

        call = partial(
            moe_w8a8_sm90.launch, config, make_call("moe", x, scores, ids, w13, w2, 208, space, *SILU, out)
        )
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            call()
        for kind in ROUTINGS:
            ids.copy_(routing(kind, tokens, 3, 6))
            expected = moe([x, scores, ids, first, second, 208, None], problem)
            for _ in range(25):
                out.fill_(math.nan)
                graph.replay()
                assert torch.equal(out, expected), kind


def test_offsets_past_two_to_the_31() -> None:
    """Weights of more than 4 GiB, of which the last expert is read."""
    operands, n, k, experts = shapes.operands_of("fp8"), 4096, 7168, 160
    assert operands is not None and experts * n * k > 2**32
    codes = torch.zeros(experts, n, k, dtype=torch.uint8, device=DEVICE)
    codes[-1] = torch.randint(0, 120, (n, k), dtype=torch.uint8, device=DEVICE)
    empty = torch.empty(0, device=DEVICE)
    tensors = [codes, torch.ones(experts, n, 1, device=DEVICE), empty, empty, empty.int(), empty.int()]
    x = torch.randn(9, k, device=DEVICE).bfloat16()
    counts = [0] * (experts - 1) + [9]
    rows, scales = sorted_operands(operands, x, counts)
    expected = (
        quantize_activation(x, "fp8_token").dequantize() @ codes[-1].view(torch.float8_e4m3fn).float().T
    )
    for choice in shapes.choices():
        out = torch.full((9, n), math.nan, dtype=torch.bfloat16, device=DEVICE)
        config = shapes.config_of(operands, choice, experts, 132)
        _launch.product(operands, config, rows, scales, tensors, offsets_of(counts), out)
        delta = (out.float() - expected).norm() / expected.norm()
        assert float(delta) < 6e-3, choice
