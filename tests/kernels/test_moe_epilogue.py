"""Biases and the clamped activation of moe and grouped_linear: agreement with transformers' gpt-oss and float64, extremes, refusals,
planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from gristmill import ops
from gristmill.autotune.verify import kernel_arguments, run_guarded, run_reference
from gristmill.kernels.load import load
from gristmill.kernels.moe._clamped import ALPHA
from gristmill.kernels.moe.grouped_linear import op as grouped_linear
from gristmill.kernels.moe.moe import op as moe
from gristmill.quant.rtn import quantize
from gristmill.quant.tensor import QuantTensor
from tests.calls import make_call
from tests.kernels.running import BLOCKS, Runnable, runnables, scheme_of

MOE, GROUPED = runnables("moe"), runnables("grouped_linear")
WHOLE = "w13_bias+w2_bias+clamp"


def _gpt_oss(experts: int, hidden: int, inner: int) -> GptOssExperts:
    config = GptOssConfig(num_local_experts=experts, hidden_size=hidden, intermediate_size=inner)
    torch.manual_seed(3)
    layer = GptOssExperts(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def test_reference_is_that_of_gpt_oss() -> None:
    """With gates and ups on both sides of the limit."""
    layer = _gpt_oss(5, 37, 21)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(11, 37, generator=generator)
    # transformers counts an expert that a token has twice once.
    ids = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(11)]).int()
    weights = torch.rand(11, 3, generator=generator)
    w13 = layer.gate_up_proj.data.transpose(1, 2)
    z = torch.einsum("th,enh->ten", x.double(), w13)
    assert 0.05 < float((z.abs() > layer.limit).double().mean()) < 0.5
    with torch.no_grad():
        expected = layer(x.double(), ids.long(), weights.double())
    parted = torch.cat((w13[:, 0::2], w13[:, 1::2]), 1).float()
    bias = torch.cat((layer.gate_up_proj_bias[:, 0::2], layer.gate_up_proj_bias[:, 1::2]), 1).detach().float()
    results = moe.reference(
        x,
        weights,
        ids,
        parted,
        layer.down_proj.data.transpose(1, 2).float(),
        w13_bias=bias,
        w2_bias=layer.down_proj_bias.detach().float(),
        clamp=True,
        alpha=layer.alpha,
        limit=layer.limit,
    )
    torch.testing.assert_close(results.double(), expected, rtol=1e-4, atol=1e-3)


def _verified(implementation: Runnable, text: str, seed: int = 6) -> None:
    op, kernel = implementation.op, implementation.kernel
    problem = op.problem(text)
    arguments = op.inputs(problem, seed, "cpu")
    config = kernel.config(problem, implementation.target)
    outputs, trespass = run_guarded(op, kernel, config, kernel_arguments(op, kernel, arguments))
    assert not trespass
    assert op.error is not None
    error = op.error(problem, arguments, outputs, run_reference(op, arguments))
    assert error <= op.tolerance(problem).limit


@pytest.mark.parametrize("implementation", MOE, ids=str)
@pytest.mark.parametrize("shape", ["m=0,h=32,i=32", "m=1,h=96,i=160", "m=7,h=64,i=35", "m=70,h=40,i=32"])
def test_moe_of_odd_shapes(implementation: Runnable, shape: str) -> None:
    """Kernels of activations in blocks take whole blocks only."""
    axes = f"{shape},top_k=3,e=7,epilogue={WHOLE}"
    scheme = scheme_of(implementation, axes, ("bf16", "mxfp4", *BLOCKS))
    if scheme is None:
        reasons = [implementation.kernel.accepts(implementation.op.problem(f"{axes},w={w}")) for w in BLOCKS]
        assert any("the columns of a scale" in str(reason) for reason in reasons), reasons
        return
    _verified(implementation, f"{axes},w={scheme}")


@pytest.mark.parametrize("implementation", GROUPED, ids=str)
@pytest.mark.parametrize("epilogue", ["bias", "bias+silu_mul", "silu_mul+clamp", "bias+silu_mul+clamp"])
def test_grouped_linear_of_odd_shapes(implementation: Runnable, epilogue: str) -> None:
    """More than one tile of rows and of columns, neither whole; kernels of activations in blocks have whole blocks."""
    axes = f"e=3,n=134,k=33,epilogue={epilogue},gather=2"
    if (scheme := scheme_of(implementation, f"m=1,{axes}", ("bf16", "mxfp4"))) is None:
        axes = axes.replace("k=33", "k=160")
        scheme = scheme_of(implementation, f"m=1,{axes}", BLOCKS)
    assert scheme is not None
    for m in (1, 75):
        _verified(implementation, f"m={m},{axes},w={scheme}")


@pytest.mark.parametrize("implementation", GROUPED, ids=str)
def test_numbers_beyond_the_limit(implementation: Runnable) -> None:
    """Infinite gates and ups are clamped, very negative gates give 0, and NaN stays NaN."""
    limit, inf, n, dtype = 7.0, float("inf"), 5, torch.float32
    gate, up = [inf, -1e30, 3e38, 1.0, float("nan")], [-inf, inf, 0.5, float("nan"), 2.0]
    top = limit / (1 + torch.exp(torch.tensor(-ALPHA * limit)).item())
    expected = torch.tensor([top * (1 - limit), 0.0, top * 1.5, float("nan"), float("nan")])
    kernel, op = implementation.kernel, implementation.op
    weight = QuantTensor.from_dense(torch.zeros(2, 2 * n, 16))
    if "dense_v1" not in kernel.layouts:
        schemes, axes = ("mxfp4", *BLOCKS), f"m=3,e=2,n={2 * n},k=32,x="
        scheme = scheme_of(implementation, f"{axes}fp32", schemes)
        if scheme is None:
            scheme, dtype = scheme_of(implementation, f"{axes}bf16", schemes), torch.bfloat16
        weight = quantize(torch.zeros(2, 2 * n, 32), str(scheme))
    bias = torch.zeros(2, 2 * n, dtype=dtype)
    bias[1] = torch.tensor([*gate, *up], dtype=dtype)
    offsets = torch.tensor([0, 0, 3], dtype=torch.int32)
    given = [
        torch.zeros(3, weight.k, dtype=dtype),
        weight,
        offsets,
        None,
        1,
        True,
        2 * n,
        bias,
        True,
        ALPHA,
        limit,
    ]
    problem = op.describe(*given)
    out, near = torch.empty(3, n, dtype=dtype), 1e-6 if dtype == torch.float32 else 1e-2
    load(kernel)(
        kernel.config(problem, implementation.target),
        make_call(kernel.op, *kernel_arguments(op, kernel, given), out),
    )
    torch.testing.assert_close(out.float(), expected.expand(3, n), rtol=near, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", [i for i in MOE if i.kernel.batch_invariant], ids=str)
def test_rows_do_not_depend_on_the_batch(implementation: Runnable) -> None:
    op, kernel = implementation.op, implementation.kernel
    scheme = "bf16" if kernel.layouts == ("dense_v1",) else "mxfp4"
    problem = op.problem(f"m=12,top_k=2,e=3,h=96,i=64,w={scheme},epilogue={WHOLE}")
    arguments = kernel_arguments(op, kernel, op.inputs(problem, 8, "cpu"))
    config, full = kernel.config(problem, implementation.target), torch.empty(12, 96, dtype=torch.bfloat16)
    load(kernel)(config, make_call(kernel.op, *arguments, full))
    for m in (1, 5):
        part = torch.empty_like(full[:m])
        load(kernel)(
            config, make_call(kernel.op, *(a[:m].contiguous() for a in arguments[:3]), *arguments[3:], part)
        )
        assert torch.equal(part, full[:m])


def test_expert_parallel_halves_add_up() -> None:
    """A rank adds the biases of its own experts alone, so that none is added twice."""
    op = MOE[0].op
    arguments = op.inputs(op.problem(f"m=10,top_k=3,e=6,h=40,i=24,x=fp32,w=fp32,epilogue={WHOLE}"), 10, "cpu")
    x, weights, ids, w13, w2, inner, _, w13_bias, w2_bias, *activation = arguments
    parts = []
    for first in (0, 3):
        own = slice(first, first + 3)
        experts = (w13.narrow(0, first, 3), w2.narrow(0, first, 3), inner, None, w13_bias[own], w2_bias[own])
        parts.append(moe.reference(x, weights, ids - first, *experts, *activation))
    torch.testing.assert_close(parts[0] + parts[1], moe.reference(*arguments), rtol=1e-5, atol=1e-5)


def test_through_a_plan(policy_file: Any) -> None:
    policy_file("strict = true\n[pins]\nmoe = ['moe_cpu']\n")
    op = MOE[0].op
    problem = op.problem(f"m=6,top_k=2,e=4,h=64,i=32,w=mxfp4,epilogue={WHOLE}")
    arguments = op.inputs(problem, 11, "cpu")
    kernel = next(i.kernel for i in MOE if i.kernel.name == "moe_cpu")
    plan = ops.bind("moe", problem, "cpu", layouts=kernel.layouts[:1]).prepare([6])
    packed = kernel_arguments(op, kernel, arguments)
    packed[6] = torch.empty(plan.workspace(6).bytes, dtype=torch.uint8)
    out = ops.moe(*packed, plan=plan)
    assert moe.error(problem, arguments, [out], [moe.reference(*arguments)]) <= op.tolerance(problem).limit
    for place, other in ((7, None), (8, None), (9, False)):  # not what the plan was made for
        with pytest.raises(ValueError, match="bias|clamp"):
            ops.moe(*packed[:place], other, *packed[place + 1 :], plan=plan)
    ops.release(plan)


def test_refusals() -> None:
    x, w13, w2 = torch.zeros(3, 8), torch.zeros(2, 12, 8), torch.zeros(2, 8, 6)
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    given = (x, weights, ids, [w13], [w2], 0, None)
    assert moe.OP.describe(*given, torch.zeros(2, 12))["epilogue"] == "w13_bias"
    for more, message in (
        (
            (torch.zeros(2, 6),),
            r"w13_bias must be \[e, \(1\+gated\)\*i\] = \[2, 12\], e as in w13, i as in w2, got \[2, 6\]",
        ),
        ((None, torch.zeros(8)), r"w2_bias must be \[e, h\] .*, got \[8\]"),
        ((None, None, True, 1.0, -1.0), "limit must be at least 0, got -1.0"),
        ((None, None, True, 1.0, float("inf")), "limit must be finite"),
        ((None, None, True, float("nan"), 7.0), "alpha must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.OP.describe(*given, *more)
    with pytest.raises(TypeError, match="w2_bias must have x's dtype torch.float32"):
        moe.OP.describe(*given, None, torch.zeros(2, 8, dtype=torch.bfloat16))
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="clamp limits the gate and up of silu_mul, which is off"):
        grouped_linear.OP.describe(x, [w13], offsets, clamp=True)
    with pytest.raises(ValueError, match=r"bias must be \[e, n\] .*, got \[12\]"):
        grouped_linear.OP.describe(x, [w13], offsets, bias=torch.zeros(12))


# Planted faults: wrong arguments, on the references.

FAULTS_OF_MOE = {
    "no bias of w13": lambda a: a | {"w13_bias": None},
    "no bias of w2": lambda a: a | {"w2_bias": None},
    "w13's bias of another expert": lambda a: a | {"w13_bias": a["w13_bias"].roll(1, 0)},
    "w2's bias of another expert": lambda a: a | {"w2_bias": a["w2_bias"].roll(1, 0)},
    "bias of up added to gate": lambda a: a | {"w13_bias": a["w13_bias"].roll(a["w2"].k, 1)},
    "not clamped": lambda a: a | {"limit": 1e30},
    "another alpha": lambda a: a | {"alpha": 1.0},
    "silu in place of it": lambda a: a | {"clamp": False},
    "one bias of an expert": lambda a: a | {"w2_bias": _without_one(a["w2_bias"])},
}
NAMES = MOE[0].op.Call.names[: -len(MOE[0].op.outputs)]


def _without_one(bias: torch.Tensor) -> torch.Tensor:
    bias = bias.clone()
    bias[0, 17] = 0
    return bias


def _moe_arguments() -> tuple[Any, dict[str, Any]]:
    problem = MOE[0].op.problem(f"m=65,top_k=4,e=5,h=256,i=128,w=mxfp4,epilogue={WHOLE}")
    return problem, dict(zip(NAMES, MOE[0].op.inputs(problem, 13, "cpu"), strict=True))


@pytest.mark.parametrize("fault", FAULTS_OF_MOE)
def test_planted_faults_of_moe(fault: str) -> None:
    problem, arguments = _moe_arguments()
    wrong = moe.reference(**FAULTS_OF_MOE[fault](arguments))
    error = moe.error(problem, [*arguments.values()], [wrong], [moe.reference(**arguments)])
    assert error > 1.5 * MOE[0].op.tolerance(problem).limit


def test_planted_fault_of_a_bias_added_without_its_weight() -> None:
    problem, arguments = _moe_arguments()
    expected, ids = moe.reference(**arguments), arguments["ids"]
    wrong = moe.reference(**arguments | {"w2_bias": None}).float()
    added = arguments["w2_bias"].float()[ids.clamp_min(0).long()] * (ids >= 0)[..., None]
    error = moe.error(problem, [*arguments.values()], [(wrong + added.sum(1)).bfloat16()], [expected])
    assert error > 1.5 * MOE[0].op.tolerance(problem).limit


@pytest.mark.parametrize(
    "fault", ["no bias", "of another expert", "after the activation", "gate alone is clamped", "up alone"]
)
def test_planted_faults_of_grouped_linear(fault: str) -> None:
    op = GROUPED[0].op
    problem = op.problem("m=257,e=5,n=64,k=256,w=mxfp4,epilogue=bias+silu_mul+clamp")
    arguments = op.inputs(problem, 12, "cpu")
    bias, limit, wrong = arguments[7], arguments[10], list(arguments)
    expected = grouped_linear.reference(*arguments)
    if fault == "no bias":
        wrong[7] = None
    elif fault == "of another expert":
        wrong[7] = bias.roll(1, 0)
    outputs = grouped_linear.reference(*wrong)
    if fault not in ("no bias", "of another expert"):
        plain = grouped_linear.reference(
            *arguments[:5], False, *arguments[6:8], False, *arguments[9:]
        ).float()
        gate, up = plain.chunk(2, 1)
        if fault == "after the activation":
            none = grouped_linear.reference(*arguments[:7], None, *arguments[8:])
            outputs = none + bias.float().mean(0)[:32]
        else:
            if fault == "up alone":
                up = up.clamp(-limit, limit)
            else:
                gate = gate.clamp(max=limit)
            outputs = gate * (ALPHA * gate).sigmoid() * (up + 1)
    error = grouped_linear.error(problem, arguments, [outputs], [expected])
    assert error > 2 * op.tolerance(problem).limit
