"""permute, grouped_linear, combine, moe: agreement with transformers' DeepSeek-V3 and float64, edge cases,
refusals, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from gristmill import ops
from gristmill.autotune.verify import kernel_arguments, run_guarded, run_reference
from gristmill.kernels.linear import op as linear
from gristmill.kernels.load import load
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.combine import op as combine
from gristmill.kernels.moe.grouped_linear import op as grouped_linear
from gristmill.kernels.moe.grouped_topk import op as grouped_topk
from gristmill.kernels.moe.moe import op as moe
from gristmill.kernels.moe.permute import op as permute
from gristmill.quant.packed import pack
from gristmill.quant.rtn import quantize
from gristmill.quant.tensor import QuantTensor
from tests.calls import make_call, positional
from tests.kernels.running import BLOCKS, CPU, Runnable, runnables, scheme_of, verify_fault

MOE, GROUPED = runnables("moe"), runnables("grouped_linear")
SILU = (None, None, False, 1.702, 7.0)
"""The last arguments of `moe`, and without the first those of `grouped_linear`: no biases, no clamped activation."""


def _i32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _deepseek(experts: int = 16, hidden: int = 64, inner: int = 48) -> DeepseekV3MoE:
    config = DeepseekV3Config(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        n_routed_experts=experts,
        num_local_experts=experts,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
    )
    torch.manual_seed(3)
    layer = DeepseekV3MoE(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        layer.gate.e_score_correction_bias.normal_(0, 0.1)
    return layer


def test_routing_and_experts_are_those_of_deepseek_v3() -> None:
    layer, x = _deepseek(), torch.randn(21, 64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = layer(x[None])[0] - layer.shared_experts(x)
        logits = x @ layer.gate.weight.T
        weights, ids = grouped_topk.reference(
            logits, 4, layer.gate.e_score_correction_bias, 4, 2, "sigmoid", layer.gate.norm_topk_prob, 2.5
        )
        results = moe.reference(
            x, weights, ids, layer.experts.gate_up_proj.data, layer.experts.down_proj.data
        )
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=2e-5)


def test_reference_against_a_float64_loop() -> None:
    op = runnables("moe")[0].op
    x, weights, ids, w13, w2, inner, *_ = op.inputs(
        op.problem("m=11,top_k=3,e=4,h=37,i=21,x=fp32,w=fp32"), 5, "cpu"
    )
    first, second = w13.dequantize().double(), w2.dequantize().double()
    expected = torch.zeros(11, 37, dtype=torch.float64)
    for t in range(11):
        for k in range(3):
            e = int(ids[t, k])
            if e >= 0:
                z = first[e] @ x[t].double()
                expected[t] += weights[t, k] * (
                    second[e] @ (z[:inner] / (1 + (-z[:inner]).exp()) * z[inner:])
                )
    torch.testing.assert_close(
        moe.reference(x, weights, ids, w13, w2).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_permute_places() -> None:
    ids = _i32([2, 0], [2, 2], [-1, 0], [3, 9])
    offsets, permutation, inverse = permute.reference(ids, 4)
    assert offsets.tolist() == [0, 2, 2, 5, 6]
    assert permutation.tolist() == [1, 5, 0, 2, 3, 6, 4, 7]
    assert inverse.tolist() == [2, 0, 3, 4, -1, 1, 5, -1]


@pytest.mark.parametrize("implementation", runnables("permute"), ids=str)
def test_permute_extremes(implementation: Runnable) -> None:
    for ids in (
        _i32([-1, -1]),
        _i32([7, 7], [7, 7]),
        _i32([0, 0]),
        _i32([2**31 - 1, -(2**31)]),
        torch.empty(0, 2).int(),
        torch.arange(1030, dtype=torch.int32).view(-1, 2) % 8,
    ):
        actual = [torch.full(shape, -9, dtype=dtype) for shape, dtype in permute.OP.like(ids, 8)]
        implementation(ids, 8, *actual)
        for out, expected in zip(actual, permute.reference(ids, 8), strict=True):
            assert torch.equal(out, expected)


ROUTINGS = {
    "one expert takes all": _i32(*[[2, 2]] * 9),
    "an id twice in a token": _i32([1, 1], [0, 3]),
    "every id of another rank": _i32([-1, 4], [9, -1]),
    "some of another rank": _i32([-1, 0], [3, 7], [1, 2]),
    "no tokens": torch.empty(0, 2, dtype=torch.int32),
}


@pytest.mark.parametrize("implementation", MOE, ids=str)
@pytest.mark.parametrize("case", ROUTINGS)
def test_moe_routings(implementation: Runnable, case: str) -> None:
    op, ids = implementation.op, ROUTINGS[case]
    axes = f"m={ids.shape[0]},top_k=2,e=4,h=64,i=32,x=fp32"
    problem = op.problem(f"{axes},w={scheme_of(implementation, axes, ('fp32', 'int4_g32', *BLOCKS))}")
    arguments = op.inputs(problem, 6, "cpu")
    arguments[2] = ids
    kernel = implementation.kernel
    outputs, trespass = run_guarded(
        op, kernel, kernel.config(problem, implementation.target), kernel_arguments(op, kernel, arguments)
    )
    assert not trespass
    assert moe.error(problem, arguments, outputs, run_reference(op, arguments)) <= op.tolerance(problem).limit
    if case == "every id of another rank":
        assert not outputs[0].any()


@pytest.mark.parametrize("implementation", MOE, ids=str)
def test_moe_in_a_workspace_of_exactly_its_size(implementation: Runnable) -> None:
    op, kernel = implementation.op, implementation.kernel
    axes = "m=5,top_k=2,e=4,h=64,i=32"
    problem = op.problem(f"{axes},w={scheme_of(implementation, axes, ('bf16', 'mxfp4', *BLOCKS))}")
    arguments = kernel_arguments(op, kernel, op.inputs(problem, 7, "cpu"))
    config = kernel.config(problem, implementation.target)
    size = kernel.workspace(problem, config).bytes
    plain = torch.empty_like(arguments[0])
    load(implementation.kernel)(config, make_call(implementation.kernel.op, *arguments, plain))
    band = torch.full((size + 512,), 171, dtype=torch.uint8)
    arguments[6], out = band[256 : 256 + size], torch.empty_like(plain)
    load(implementation.kernel)(config, make_call(implementation.kernel.op, *arguments, out))
    assert torch.equal(out, plain) and (band[:256] == 171).all() and (band[256 + size :] == 171).all()
    arguments[6] = band[: size - 1]
    with pytest.raises(ValueError, match="workspace must be"):
        load(implementation.kernel)(config, make_call(implementation.kernel.op, *arguments, out))


@pytest.mark.parametrize("implementation", [i for i in MOE + GROUPED if i.kernel.batch_invariant], ids=str)
def test_rows_do_not_depend_on_the_batch(implementation: Runnable) -> None:
    op, kernel = implementation.op, implementation.kernel
    if op.name != "moe":
        return
    scheme = "bf16" if kernel.layouts == ("dense_v1",) else "int4_g32"
    for m in (1, 3, 12):
        problem = op.problem(f"m=12,top_k=2,e=3,h=96,i=64,w={scheme}")
        arguments = kernel_arguments(op, kernel, op.inputs(problem, 8, "cpu"))
        config = kernel.config(problem, implementation.target)
        full, part = torch.empty_like(arguments[0]), torch.empty_like(arguments[0][:m])
        load(kernel)(config, make_call(kernel.op, *arguments, full))
        load(kernel)(
            config, make_call(kernel.op, *(a[:m].contiguous() for a in arguments[:3]), *arguments[3:], part)
        )
        assert torch.equal(part, full[:m])


@pytest.mark.parametrize("implementation", GROUPED, ids=str)
def test_only_experts_with_rows_are_read(implementation: Runnable) -> None:
    """The weights of experts without rows are NaN, or vast; the result of the expert with rows is correct."""
    dense, dtype = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(9)), torch.float32
    if "dense_v1" in implementation.kernel.layouts:
        dense[0::3] = float("nan")
        weight = QuantTensor.from_dense(dense)
    else:
        schemes, axes = ("fp8_ch", *BLOCKS), "m=5,e=4,n=32,k=64,x="
        scheme = scheme_of(implementation, f"{axes}fp32", schemes)
        if scheme is None:
            scheme, dtype = scheme_of(implementation, f"{axes}bf16", schemes), torch.bfloat16
        weight = quantize(dense, str(scheme))
        weight.scales[0::3] = (
            0xFE if weight.scales.dtype is torch.uint8 else torch.finfo(weight.scales.dtype).max
        )
    x, offsets = torch.randn(5, 64).to(dtype), _i32(0, 0, 2, 5, 5)
    kernel, op = implementation.kernel, implementation.op
    problem = op.describe(x, weight, offsets)
    arguments = kernel_arguments(op, kernel, [x, weight, offsets, None, 1, False, 32, *SILU[1:]])
    out, near = torch.full((5, 32), float("nan"), dtype=dtype), 1e-4 if dtype == torch.float32 else 1e-2
    load(kernel)(kernel.config(problem, implementation.target), make_call(kernel.op, *arguments, out))
    torch.testing.assert_close(out, grouped_linear.reference(x, weight, offsets), rtol=near, atol=near)


def test_cpu_refuses_offsets_and_permutations_that_leave_their_tensors() -> None:
    kernel = next(i for i in GROUPED if i.kernel.name == "grouped_linear_cpu").kernel
    weight = pack(QuantTensor.from_dense(torch.randn(2, 16, 32)), "cpu_rows16_v1").tensors
    op = GROUPED[0].op
    config = kernel.config(op.problem("m=3,e=2,n=16,k=32,x=fp32,w=fp32"), CPU)
    x, out = torch.randn(3, 32), torch.empty(3, 16)
    for offsets, permutation in (
        (_i32(0, 2, 4), None),
        (_i32(0, 2, 1), None),
        (_i32(1, 2, 3), None),
        (_i32(0, 1, 3), _i32(0, 3, 1)),
        (_i32(0, 1, 3), _i32(0, -1, 1)),
    ):
        with pytest.raises(ValueError, match="out of its range"):
            load(kernel)(
                config, make_call(kernel.op, x, weight, offsets, permutation, 1, False, 16, *SILU[1:], out)
            )


def test_expert_parallel_halves_add_up() -> None:
    """Two ranks with half of the experts each and ids shifted to their own: both results add up to the whole."""
    op = MOE[0].op
    x, weights, ids, w13, w2, *_ = op.inputs(
        op.problem("m=10,top_k=3,e=6,h=40,i=24,x=fp32,w=fp32"), 10, "cpu"
    )
    parts = [
        moe.reference(x, weights, ids - first, w13.narrow(0, first, 3), w2.narrow(0, first, 3))
        for first in (0, 3)
    ]
    torch.testing.assert_close(
        parts[0] + parts[1], moe.reference(x, weights, ids, w13, w2), rtol=1e-5, atol=1e-6
    )


def test_refusals() -> None:
    x, w13, w2 = torch.zeros(3, 8), torch.zeros(2, 12, 8), torch.zeros(2, 8, 6)
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    assert moe.OP.describe(x, weights, ids, [w13], [w2])["i"] == 6
    for arguments, message in (
        (
            (x, weights, ids, [w13], [w2.transpose(1, 2).contiguous()]),
            r"w13 must be \[e, \(1\+gated\)\*i, h\] = \[2, 16, 8\], i as in w2",
        ),
        (
            (x[:, :7].contiguous(), weights, ids, [w13], [w2]),
            r"w13 must be \[e, \(1\+gated\)\*i, h\] = \[2, 12, 7\], i as in w2, h as in x, got \[2, 12, 8\]",
        ),
        (
            (x, weights[:, :1].contiguous(), ids, [w13], [w2]),
            r"ids must be \[m, top_k\] = \[3, 1\], m as in x, top_k as in weights",
        ),
        (
            (x, weights, ids, [torch.zeros(2, 11, 8)], [w2]),
            r"w13 must be \[e, \(1\+gated\)\*i, h\] = \[2, 12, 8\]",
        ),
        ((x, weights, ids, [w13, w13], [w2]), "from which the scheme cannot be derived"),
        ((x, weights, ids, [w13], [w2.bfloat16()]), "w2 must be of w13's scheme fp32, got 'bf16'"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.OP.describe(*arguments)
    with pytest.raises(TypeError, match="ids must be torch.int32"):
        moe.OP.describe(x, weights, ids.long(), [w13], [w2])
    with pytest.raises(ValueError, match="n must be 0 or the n of the weight, 12, got 5"):
        grouped_linear.OP.describe(x, [w13], _i32(0, 1, 3), n=5)
    with pytest.raises(
        ValueError, match=r"expert_offsets must be \[e\+1\] = \[3\], e as in weight, got \[2\]"
    ):
        grouped_linear.OP.describe(x, [w13], _i32(0, 3))
    with pytest.raises(TypeError, match="ids must be torch.int32"):
        permute.OP.describe(ids.long(), 4)
    with pytest.raises(ValueError, match=r"inverse must be \(m\*top_k\) elements = \[6\]"):
        combine.OP.describe(torch.zeros(6, 8), _i32(0, 1), weights)


def test_through_a_plan(policy_file: Any) -> None:
    policy_file("strict = true\n[pins]\nmoe = ['moe_cpu']\n")
    op = MOE[0].op
    problem = op.problem("m=6,top_k=2,e=4,h=64,i=32,w=int4_g32")
    arguments = op.inputs(problem, 11, "cpu")
    kernel = next(i.kernel for i in MOE if i.kernel.name == "moe_cpu")
    plan = ops.bind("moe", problem, "cpu", layouts=kernel.layouts[:1]).prepare([6])
    packed = kernel_arguments(op, kernel, arguments)
    packed[6] = torch.empty(plan.workspace(6).bytes, dtype=torch.uint8)
    out = ops.moe(*packed, plan=plan)
    assert moe.error(problem, arguments, [out], [moe.reference(*arguments)]) <= op.tolerance(problem).limit
    ops.release(plan)


# Planted faults: launchers that are wrong in one place, on unpacked weights, so that `pack` is the
# reference's own.


def _fault(op: str, launcher: str, problem: str) -> None:
    outcome = verify_fault(op, __name__, launcher, problem)
    assert not outcome.ok and "tolerance" in outcome.reason, outcome


@positional
def late_offset(config, ids, experts, offsets, permutation, inverse) -> None:
    for out, correct in zip((offsets, permutation, inverse), permute.reference(ids, experts), strict=True):
        out.copy_(correct)
    offsets[experts // 2] += 1


@positional
def unstable(config, ids, experts, offsets, permutation, inverse) -> None:
    results = permute.reference(ids.flatten().flip(0).view_as(ids), experts)
    offsets.copy_(results[0])
    permutation.copy_(ids.numel() - 1 - results[1])
    inverse.copy_(results[2].flip(0))


@positional
def dropped_token(config, y, inverse, weights, out) -> None:
    results = combine.reference(y, inverse, weights)
    results[-1] = combine.reference(y, torch.full_like(inverse, -1), weights)[-1]
    out.copy_(results)


@positional
def forgotten_last_k(config, y, inverse, weights, out) -> None:
    weights = weights.clone()
    weights[3, -1] = 0
    out.copy_(combine.reference(y, inverse, weights))


@pytest.mark.parametrize(
    ("op", "launcher", "problem"),
    [
        ("permute", "late_offset", "m=33,top_k=2,e=8"),
        ("permute", "unstable", "m=33,top_k=2,e=8"),
        ("combine", "dropped_token", "m=64,top_k=4,h=128"),
        ("combine", "forgotten_last_k", "m=257,top_k=8,h=256"),
    ],
)
def test_planted_faults_of_the_index_ops(op: str, launcher: str, problem: str) -> None:
    _fault(op, launcher, problem)


def _faulty_weight(weight: QuantTensor, fault: str) -> QuantTensor:
    """Returns the weight with one block scale of one expert doubled, or with two experts swapped."""
    scales, codes = weight.scales.clone(), weight.codes.clone()
    if fault == "one scale":
        scales[-1, 3, 1] = (scales[-1, 3, 1].float() * 2).to(scales.dtype)
    else:
        codes[[0, 2]] = codes[[2, 0]]
    return QuantTensor(codes, scales, weight.shape, weight.scheme)


@pytest.mark.parametrize("gather", [0, 8])
@pytest.mark.parametrize("fault", ["one scale", "swapped experts", "offset"])
def test_planted_faults_of_grouped_linear(fault: str, gather: int) -> None:
    op = GROUPED[0].op
    problem = op.problem(f"m=257,e=5,n=64,k=256,w=int4_g32,gather={gather}")
    arguments = op.inputs(problem, 12, "cpu")
    wrong = list(arguments)
    if fault == "offset":
        wrong[2] = arguments[2].clone()
        wrong[2][3] += 1
    else:
        wrong[1] = _faulty_weight(arguments[1], fault)
    error = grouped_linear.error(problem, arguments, run_reference(op, wrong), run_reference(op, arguments))
    assert error > 2 * op.tolerance(problem).limit


def test_weights_rounded_to_bf16_pass_where_rows_are_gathered_often() -> None:
    """19 places of three rows of x are no 19 samples of the rounding of a weight."""
    op = GROUPED[0].op
    problem = op.problem("m=19,e=4,n=33,k=256,x=bf16,w=int4_g128,gather=8")
    arguments = op.inputs(problem, 0, "cpu")
    rounded = QuantTensor.from_dense(arguments[1].dequantize().bfloat16())
    outputs = run_reference(op, [arguments[0], rounded, *arguments[2:]])
    expected, limit = run_reference(op, arguments), op.tolerance(problem).limit
    assert 0 < grouped_linear.error(problem, arguments, outputs, expected) <= limit
    wrong = _faulty_weight(arguments[1], "one scale")
    outputs = run_reference(op, [arguments[0], wrong, *arguments[2:]])
    assert grouped_linear.error(problem, arguments, outputs, expected) > 4 * limit


@pytest.mark.parametrize(
    "fault", ["w13 scale", "w2 scale", "dropped token", "up before gate", "weight of another k"]
)
def test_planted_faults_of_moe(fault: str) -> None:
    op = MOE[0].op
    problem = op.problem("m=65,top_k=4,e=5,h=256,i=128,w=int4_g32")
    arguments = op.inputs(problem, 13, "cpu")
    x, weights, ids, w13, w2, inner, *_ = arguments
    wrong = list(arguments)
    if fault.endswith("scale"):
        place = 3 if fault.startswith("w13") else 4
        wrong[place] = _faulty_weight(arguments[place], "one scale")
    elif fault == "dropped token":
        wrong[2] = ids.clone()
        wrong[2][40, 2] = -1
    elif fault == "up before gate":
        wrong[3] = QuantTensor(w13.codes.roll(inner, 1), w13.scales.roll(inner, 1), w13.shape, w13.scheme)
    else:
        wrong[1] = weights.clone()
        wrong[1][7] = weights[7].roll(1)
    error = moe.error(problem, arguments, run_reference(op, wrong), run_reference(op, arguments))
    assert error > 1.5 * op.tolerance(problem).limit, fault


@pytest.mark.parametrize("fault", ["w13 scale", "w2 scale", "experts", "scale of a token", "none"])
@pytest.mark.parametrize("scheme", ["fp8_block.fp8_g128", "fp8_ch.fp8_token"])
def test_planted_faults_of_moe_with_8_bit_activations(scheme: str, fault: str) -> None:
    """One doubled scale shows, of eight blocks or of 128 channels; gate and up rounded to x's dtype, as kernels may, pass."""
    op, inner = MOE[0].op, 1024 if "block" in scheme else 128
    problem = op.problem(f"m=65,top_k=2,e=3,h=272,i={inner},w={scheme}")
    arguments = op.inputs(problem, 13, "cpu")
    x, _, ids, w13, w2, *_ = arguments
    wrong, expected = list(arguments), run_reference(op, arguments)
    if fault.endswith(" scale"):
        place, weight = (3, w13) if fault.startswith("w13") else (4, w2)
        scales = weight.scales.clone()
        scales[0, 1, 0] *= 2
        wrong[place] = weight.with_tensors({**weight.tensors(), "scales": scales}, weight.shape)
    elif fault == "experts":
        wrong[2] = torch.where(ids == 0, 2, torch.where(ids == 2, 0, ids))
    elif fault == "scale of a token":
        wrong[0] = x.clone()
        wrong[0][5] *= 2
    out = run_reference(op, wrong) if fault != "none" else [rounded_between(arguments)]
    error, limit = moe.error(problem, arguments, out, expected), op.tolerance(problem).limit
    assert 0 < error < 0.7 * limit if fault == "none" else error > 1.5 * limit


def rounded_between(arguments: list[Any]) -> torch.Tensor:
    """The reference with gate and up in x's dtype."""
    x, weights, ids, w13, w2, *_ = arguments
    terms = torch.zeros(*ids.shape, x.shape[1])
    values = moe.activations(x, w13.scheme.activation)
    for e, (first, second) in enumerate(zip(w13.experts(), w2.experts(), strict=True)):
        token, place = torch.where(ids == e)
        acts = linear.gated((values[token] @ first.dequantize().T).to(x.dtype).float()).to(x.dtype)
        terms[token, place] = moe.activations(acts, w2.scheme.activation) @ second.dequantize().T
    return (weights[..., None] * terms).sum(1).to(x.dtype)


def test_calls_without_a_plan_take_dense_weights(policy_file: Any) -> None:
    policy_file("")
    op = MOE[0].op
    problem = op.problem("m=6,top_k=2,e=4,h=48,i=24,x=fp32,w=fp32")
    x, weights, ids, w13, w2, *_ = op.inputs(problem, 15, "cpu")
    out = ops.moe(x, weights, ids, [w13.dense()], [w2.dense()])
    torch.testing.assert_close(out, moe.reference(x, weights, ids, w13, w2), rtol=1e-5, atol=1e-5)
    offsets, permutation, inverse = ops.permute(ids, 4)
    acts = ops.grouped_linear(x, [w13.dense()], offsets, permutation, 2, True)
    rows = ops.grouped_linear(acts, [w2.dense()], offsets)
    torch.testing.assert_close(ops.combine(rows, inverse, weights), out, rtol=1e-5, atol=1e-5)


def test_chain_takes_other_parts_in_the_middle() -> None:
    """As in expert parallelism: the chain keeps its first and last parts and takes other matrix products
    between them."""
    op = MOE[0].op
    problem = op.problem("m=6,top_k=2,e=4,h=32,i=16,x=fp32,w=fp32")
    x, weights, ids, w13, w2, inner, *_ = op.inputs(problem, 14, "cpu")
    called = []

    def middle(call) -> None:
        called.append(call.n)
        call.out.copy_(grouped_linear.reference(*call.arguments()))

    def placed(call) -> None:
        call.expert_offsets.copy_(permute.reference(call.ids, call.experts)[0])
        call.permutation.copy_(permute.reference(call.ids, call.experts)[1])
        call.inverse.copy_(permute.reference(call.ids, call.experts)[2])

    def summed(call) -> None:
        call.out.copy_(combine.reference(call.y, call.inverse, call.weights))

    out = torch.empty_like(x)
    parts = _chain.Parts(placed, middle, middle, summed)
    _chain.run(parts, op.Call(x, weights, ids, [w13], [w2], inner, out=out))
    assert called == [2 * inner, 32]
    torch.testing.assert_close(out, moe.reference(x, weights, ids, w13, w2), rtol=1e-5, atol=1e-6)
