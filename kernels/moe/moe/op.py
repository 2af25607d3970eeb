"""MoE: the experts of each token, gathered, run and summed. The composite of permute, two grouped_linear, and combine.

Routing (grouped_topk) comes before it; shared experts are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import STRIDED, VECTORS, Scalar, Tensor, Weight, WorkspaceArgument
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels import given_codes
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.given_codes import activations
from gristmill.kernels.linear.op import as_quant, pack
from gristmill.kernels.moe import _rows
from gristmill.kernels.moe._clamped import ALPHA, INPUT_LIMIT, LIMIT, clamped, clamped_error
from gristmill.kernels.moe.moe._activated import FUNCTIONS, activated, activated_error, activation_fits
from gristmill.kernels.quantized_inputs import misfit, random_weight
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

    from gristmill.kernels.linear.op import WeightLike


def reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    w13: WeightLike,
    w2: WeightLike,
    inter: int = 0,
    workspace: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    clamp: bool = False,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    expert_offsets: torch.Tensor | None = None,
    permutation: torch.Tensor | None = None,
    inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, H], weights float32 [T, K], ids int32 [T, K], w13 QuantTensor [E, 2 I, H], w2 [E, H, I] -> [T, H] in x's dtype.

    out[t] = Σₖ weights[t, k] · (W2[e] · h + b2[e]) with h = silu(gate) · up, where gate, up are the halves of W13[e] · x[t] + b13[e]
    (gate rows first) and e = ids[t, k]; ids outside 0...E-1 (an expert of another rank) add nothing. Biases are in x's dtype:
    w13_bias [E, 2 I], w2_bias [E, H]. clamp: h = g · sigmoid(alpha · g) · (u + 1), where g = min(gate, limit) and
    u = clamp(up, -limit, limit), as in gpt-oss (arXiv:2508.10925). All in float32, summed over k in order, rounded once. A scheme with
    an activation part quantizes x, and h after it was rounded to x's dtype, by that format's rule, a row at a time: nvfp4 has a multiplier
    for each row. Reads the ids on the host.

    activation: another function than silu, as of `activation`. gated: False = h = f(W13[e] · x[t] + b13[e]), with w13 [E, I, H] and w13_bias
    [E, I] (Nemotron's relu²).

    codes [T, H], scales float32 [T, groups]: x as quantized in that format (as of `linear`); the values of x are not read then.

    expert_offsets int32 [E + 1], permutation and inverse int32 [T * K]: what `permute(ids, E)` gives, all three or none. Kernels that sort
    rows by expert then do not sort them again; others do not read them, as this function does not.
    """
    import torch

    w13, w2 = as_quant(w13), as_quant(w2)
    values = activations(x, w13.scheme.activation, codes, scales, by_row=True)
    terms = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for e, (up_proj, down_proj) in enumerate(zip(w13.experts(), w2.experts(), strict=True)):
        token, place = torch.where(ids == e)
        if token.numel():
            z = values[token] @ up_proj.dequantize().T
            if w13_bias is not None:
                z = z + w13_bias[e].float()
            inner_values = clamped(z, alpha, limit) if clamp else activated(z, activation, gated)
            if w2.scheme.activation is not None:
                inner_values = activations(inner_values.to(x.dtype), w2.scheme.activation, by_row=True)
            y = inner_values @ down_proj.dequantize().T
            terms[token, place] = y if w2_bias is None else y + w2_bias[e].float()
    out = torch.zeros_like(values)
    for k in range(ids.shape[1]):
        out += weights[:, k, None] * terms[:, k]
    return out.to(x.dtype)


def check(problem: Problem) -> str | None:
    """Why the axes of `problem` are inconsistent; None if they are not."""
    clamp = "clamp" in problem.flags("epilogue")
    return (
        _rows.misfit(problem.text("w"))
        or activation_fits(problem.text("activation"), bool(problem["gated"]), clamp)
        or misfit(problem.text("w"), min(problem.integers("h", "i")), bool(problem["act_order"]))
        or given_codes.misfit(problem)
    )


LARGE = 1 << 25
"""Numbers of a matrix of all experts up to which arguments are drawn on the CPU."""


NO_ORDER = (None, None, None)
"""Kernels sort the rows: offsets, permutation and inverse that are not given."""


def codes_fit(
    codes: torch.Tensor | None, scales: torch.Tensor | None, w: str, h: int, rows: int, groups: int
) -> str | None:
    """Given codes and scales are those of the weights' activation format."""
    return given_codes.fits(codes, scales, w, h, rows, groups)


def order_is_whole(
    expert_offsets: torch.Tensor | None, permutation: torch.Tensor | None, inverse: torch.Tensor | None
) -> str | None:
    """The order of rows is given with all of its tensors, or not at all."""
    given = [tensor is not None for tensor in (expert_offsets, permutation, inverse)]
    return None if all(given) or not any(given) else "expert_offsets, permutation and inverse go together"


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Skewed experts, one with nothing, ids repeated within a token, ids of other ranks.

    More than `LARGE` weights are drawn by the device, whose values they depend on: on a CPU they take seconds. Routing and tokens are the same on
    every device: how many experts are read decides how long a call takes.
    """
    draw, (m, k, e, h, i) = Draw(problem, seed, device), problem.integers("m", "top_k", "e", "h", "i")
    ids, weights = draw.experts(m, k, power=1.5, foreign=0.03), draw.uniform(m, k) + 0.1
    weights /= weights.sum(-1, keepdim=True)
    (x,) = draw.stored(draw.rows(m, h, spread=0.5))
    rows = _rows_of_w13(problem)
    is_large = e * h * i > LARGE and not problem["act_order"]
    of_weights = Draw(problem, seed, device, source=device) if is_large else draw
    w13, w2 = random_weight(of_weights, e, rows, h), random_weight(of_weights, e, h, i)
    flags = problem.flags("epilogue")
    w13_bias = draw.stored(draw.normal(e, rows))[0] if "w13_bias" in flags else None
    w2_bias = draw.stored(draw.normal(e, h))[0] if "w2_bias" in flags else None
    arguments = [weights.to(device), ids.to(device), w13, w2, i, None]
    arguments += [w13_bias, w2_bias, "clamp" in flags, ALPHA, INPUT_LIMIT]
    form = problem.text("activation"), bool(problem["gated"])
    if not problem["codes"]:
        return [x, *arguments, None, None, *form, *NO_ORDER]
    codes = given_codes.codes_of(x, str(w13.scheme.activation))
    return [x.fill_(float("nan")), *arguments, *codes, *form, *NO_ORDER]  # x is not read


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """|Δ| over the expected size of an error, propagated to the output: RMS of the worst column or worst token.

    A fault in w2 shows in its column, one in w13 in every column of the tokens of its expert.
    For token t and column h the expected size is the square root of Σₖ w²·(‖a‖·‖w2‖/√I)² + w²·Σᵢ (w2·δᵢ)², a the activations of (t, k)
    and δ the effect of an error of ‖x‖·‖w13‖/√H in gate and up on them. Biases are added to the sizes because they are rounded with the
    sums.
    """
    import torch

    x, weights, ids, w13, w2, _, _, w13_bias, w2_bias, clamp, alpha, limit = arguments[:12]
    codes, scales, activation, gated = arguments[12:16]
    w13, w2 = as_quant(w13), as_quant(w2)
    if codes is not None:
        x = activations(x, w13.scheme.activation, codes, scales)
    out, ref = outputs[0].double(), references[0].double()
    if out.numel() == 0:
        return 0.0
    square = torch.zeros_like(ref)
    for e, (first, second) in enumerate(zip(w13.experts(), w2.experts(), strict=True)):
        token, k = torch.where(ids == e)
        if not token.numel():
            continue
        up_proj, down_proj = first.dequantize().double(), second.dequantize().double()
        rows = x[token].double()
        z = rows @ up_proj.T
        size = rows.norm(dim=1, keepdim=True) * up_proj.norm(dim=1) / w13.k**0.5
        if w13_bias is not None:
            z, size = z + w13_bias[e].double(), size + w13_bias[e].double().abs()
        if clamp:
            acts, spread = clamped(z, alpha, limit), clamped_error(z, size, alpha, limit)
        else:
            acts, spread = activated(z, activation, gated), activated_error(z, size, activation, gated)
        down_error = acts.square().sum(1, keepdim=True) * down_proj.square().sum(1) / w2.k
        if w2_bias is not None:
            down_error = down_error + w2_bias[e].double().square()
        square.index_add_(
            0, token, weights[token, k].double()[:, None] ** 2 * (down_error + spread**2 @ down_proj.T**2)
        )
    delta = torch.where(out == ref, 0.0, (out - ref).abs() / (square.sqrt() + ref.abs()).clamp_min(1e-30))
    square = delta.square()
    return float(max(square.mean(0).max(), square.mean(1).max()) ** 0.5)


def cost(problem: Problem) -> Cost:
    """x and the output once, and both weights of at most as many experts as there are entries of ids."""
    m, k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    scheme, item = QuantScheme.parse(problem.text("w")), ITEM_BYTES[problem.text("x")]
    flags, rows = problem.flags("epilogue"), _rows_of_w13(problem)
    biases = (rows * ("w13_bias" in flags) + h * ("w2_bias" in flags)) * item
    read = min(m * k, e) * (scheme.weight_bytes(rows, h) + scheme.weight_bytes(h, i) + biases)
    unit = problem.text("x")
    if scheme.activation is not None:
        unit = "int8" if scheme.activation.startswith("int8") else "fp8"
    return Cost(
        bytes=m * h * (item + (1 if problem["codes"] else item)) + 8 * m * k + read,
        flops=2 * m * k * h * (rows + i),
        unit=unit,
    )


def tolerance(problem: Problem) -> Tolerance:
    """Rounding of intermediate results (activations, expert rows) and of weights to the dtype of x.

    With quantized activations, gate and up that are rounded before the activation move a few of a hundred 8-bit codes to their
    neighbours, an eighth away; a token's experts may be the same one, whose errors add up.
    """
    base, few = {"fp32": 3e-6, "fp16": 3.5e-4, "bf16": 2.5e-3}[problem.text("x")], 4
    if QuantScheme.parse(problem.text("w")).activation is not None:
        base, few = {"fp32": 2e-3, "fp16": 1.5e-2, "bf16": 2.3e-2}[problem.text("x")], 3
    return Tolerance("columns", base * (1 + few / max(1, problem.integer("m")) ** 0.5))


def shrink(problem: Problem) -> Problem:
    """At most 65 tokens, 16 experts and a part of large weights with the same remainders."""
    h, i = problem.integers("h", "i")
    return problem.with_values(
        m=min(problem.integer("m"), 65),
        e=min(problem.integer("e"), 16),
        h=h if h <= 1024 else 512 + h % 512,
        i=i if i <= 512 else 256 + i % 256,
    )


def weight_shapes(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Gate and up [2 I, H], or up alone, and down [H, I], of an expert."""
    h, i = problem.integers("h", "i")
    return (_rows_of_w13(problem), h), (h, i)


def _rows_of_w13(problem: Problem) -> int:
    """Gate and up together, or up alone."""
    return problem.integer("i") * (2 if problem["gated"] else 1)


EPILOGUE = ("w13_bias", "w2_bias", "clamp")

OP = Op(
    name="moe",
    family="moe",
    summary="routed experts of each token: gate and up, activation, down, weighted sum",
    axes=(
        Axis("m", "int", "tokens", dynamic=True),
        Axis("top_k", "int", "experts per token", minimum=1),
        Axis("e", "int", "experts", minimum=1),
        Axis("h", "int", "hidden size", minimum=1),
        Axis("i", "int", "intermediate size of an expert", minimum=1),
        Axis("x", "dtype", "dtype of x and the output", default="bf16", choices=FLOATS),
        Axis("w", "scheme", "how both weights are stored", default="bf16"),
        Axis("epilogue", "flags", "what else follows the products", default="none", choices=EPILOGUE),
        Axis("act_order", "bool", "columns belong to groups in any order (GPTQ's desc_act)", default=False),
        Axis("codes", "bool", "x is given as codes and scales", default=False, opt_in=True),
        Axis("activation", "choice", "between the products", default="silu", choices=FUNCTIONS, opt_in=True),
        Axis("gated", "bool", "whether w13 has gate and up, not up alone", default=True, opt_in=True),
    ),
    arguments=(
        Tensor("x", "m h"),
        Tensor("weights", "m top_k", dtype="fp32"),
        Tensor("ids", "m top_k", dtype="int32"),
        Weight("w13", "e (1+gated)*i h"),
        Weight("w2", "e h i"),
        Scalar("inter", "int", 0, states="i"),
        WorkspaceArgument(),
        Tensor("w13_bias", "e (1+gated)*i", optional=True),
        Tensor("w2_bias", "e h", optional=True),
        Scalar("clamp", "bool", False),
        Scalar("alpha", "float", ALPHA, finite=True),
        Scalar("limit", "float", LIMIT, minimum=0.0, finite=True),
        Tensor("codes", "m h", dtype="", strides=VECTORS, optional=True),
        Tensor("scales", "rows groups", dtype="fp32", strides=STRIDED, optional=True),
        Scalar("activation", "str", "silu"),
        Scalar("gated", "bool", True),
        Tensor("expert_offsets", "e+1", dtype="int32", optional=True, derived=True),
        Tensor("permutation", "m*top_k", dtype="int32", optional=True, derived=True),
        Tensor("inverse", "m*top_k", dtype="int32", optional=True, derived=True),
    ),
    rules=(codes_fit, activation_fits, order_is_whole),
    returns=(Tensor("out", "m h"),),
    reference=reference,
    inputs=inputs,
    check=check,
    cost=cost,
    tolerance=tolerance,
    error=error,
    shrink=shrink,
    pack=pack,
    unplanned=frozenset({"dense_v1"}),
    weights=weight_shapes,
    bucket="m",
    examples=problems(
        """
        m=0,top_k=2,e=4,h=32,i=16  m=1,top_k=1,e=1,h=1,i=1,x=fp32,w=fp32
        m=13,top_k=3,e=5,h=67,i=35,x=fp32,w=fp32  m=9,top_k=2,e=4,h=48,i=33
        m=5,top_k=4,e=6,h=64,i=40,x=fp16,w=fp16  m=7,top_k=2,e=3,h=128,i=64,w=int4_g32_zp
        m=6,top_k=2,e=3,h=140,i=130,w=fp8_block  m=3,top_k=3,e=4,h=64,i=96,w=mxfp4
        m=4,top_k=2,e=3,h=64,i=48,x=fp32,w=nvfp4  m=11,top_k=2,e=4,h=64,i=96,w=mxfp4,epilogue=w13_bias+w2_bias+clamp
        m=8,top_k=2,e=3,h=40,i=17,x=fp32,w=fp32,epilogue=w13_bias+w2_bias+clamp  m=6,top_k=2,e=3,h=48,i=32,x=fp16,w=fp16,epilogue=clamp
        m=7,top_k=2,e=3,h=144,i=136,w=fp8_block.fp8_g128  m=9,top_k=3,e=4,h=67,i=33,x=fp32,w=fp8_ch.fp8_token
        m=7,top_k=2,e=3,h=96,i=64,w=mxfp4.mxfp4  m=9,top_k=3,e=4,h=64,i=48,x=fp32,w=nvfp4.nvfp4,epilogue=w13_bias+w2_bias+clamp
        m=8,top_k=2,e=3,h=64,i=160,x=fp16,w=mxfp8.mxfp8  m=8,top_k=2,e=3,h=96,i=32,w=mxfp4.mxfp8,activation=relu2,gated=false
        m=7,top_k=2,e=3,h=144,i=136,w=fp8_block.fp8_g128,codes=true  m=9,top_k=3,e=4,h=67,i=33,x=fp32,w=int8_ch.int8_token,codes=true
        m=5,top_k=2,e=3,h=33,i=32,epilogue=w2_bias  m=5,top_k=2,e=3,h=32,i=40,w=int4_g32,epilogue=w13_bias
        m=13,top_k=3,e=5,h=67,i=35,x=fp32,w=fp32,activation=gelu_tanh
        m=9,top_k=2,e=4,h=48,i=33,activation=relu2,gated=false,epilogue=w13_bias
        m=7,top_k=2,e=3,h=128,i=64,x=fp16,w=int4_g32_zp,activation=gelu  m=4,top_k=2,e=3,h=64,i=96,w=mxfp4,activation=silu,gated=false
        """
    ),
    bench=problems(
        """
        m=1,top_k=8,e=128,h=2048,i=768  m=64,top_k=8,e=128,h=2048,i=768,w=fp8_block
        m=1,top_k=8,e=128,h=2048,i=768,w=int4_g128
        """
    ),
)
