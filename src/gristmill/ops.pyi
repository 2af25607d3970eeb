"""Written by `python ci/generate.py` from the registry; do not edit."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem

def bind(
    op: str,
    problem: Problem | str | Mapping[str, object],
    device: str | torch.device,
    policy: Policy | None = None,
    layouts: Collection[str] | None = None,
) -> BoundPlan:
    """A plan for every call of `op` with the static part of `problem`, with a handle for the torch operator.

    The same arguments give the same plan, and the same handle in every process. A plan over several layouts takes the tensors of
    all of them, in the order of their names (`LinearWeight.tensors`), and reads those of the kernel for the call's size.

    Args:
        problem: text such as ``n=4096,x=bf16``, a dict of axis values, or a Problem; its dynamic axes are ignored.
        device: a torch device of this machine.
        policy: None = the one that GRISTMILL_POLICY names.
        layouts: the layouts in which the weights are packed; None for operations without packed weights, and for dense weights that are given
            as they are.

    Raises:
        UnknownError: no such operation or layout.
        AxisError: a problem that it does not have.
        ValueError: no such device, or quantized weights without layouts.
    """

def layouts(
    op: str,
    problem: Problem | str | Mapping[str, object],
    device: str | torch.device,
    policy: Policy | None = None,
    without: Collection[str] = (),
) -> frozenset[str]:
    """The layouts in which the weights of a layer are to be packed: those that the fastest kernels read, within the policy's
    bound on memory.

    Kernels without a record are verified first, which takes seconds.

    Args:
        op, problem, device, policy: as for `bind`.
        without: layouts that cannot hold the weight.

    Raises:
        UnknownError: no such operation.
        AxisError: a problem that it does not have.
        NoKernelError: no kernel runs it here under the policy.
    """

def prepare(
    sizes: Iterable[int] | None = None,
) -> None:
    """Resolve, verify and load the kernels of every plan that is bound, for these sizes of its dynamic axis (None: all buckets).

    For the warm-up of a host, which then calls `seal`.

    Raises:
        NoKernelError: no kernel runs a size under the policy.
    """

def release(
    plan: BoundPlan,
) -> None:
    """Release a plan. Once it was released as often as it was bound, calls with its handle fail."""

def resolver(
    device: str | torch.device,
    policy: Policy | None = None,
) -> Resolver:
    """The resolver of a device under a policy (None: the one GRISTMILL_POLICY names), made once."""

def seal(
    on: bool = True,
) -> None:
    """From now on the plans that are bound verify nothing, so that no request waits for it.

    A size that `prepare` has not covered gets the best kernel that is verified for it already, with a warning, and where there is
    none the call raises UnpreparedError. ``seal(False)`` lifts it. It does not hold for plans that are bound later.
    """

def activation(
    x: Tensor,
    function: str,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gelu, silu, relu or relu² of every value.

    x [..., N] -> f(x) [..., N] in x's dtype, computed in float64, as gelu cancels for negative values, and rounded once.

    gelu(x) = x · Φ(x), Φ being the distribution function of the normal distribution (Hendrycks and Gimpel, 2016; BERT); gelu_tanh is
    x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (Gemma); silu(x) = x / (1 + e^-x); relu2(x) = max(x, 0)² (So et al., 2021: Primer).

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: length of a row; an integer of at least 1
        x: dtype of x and the output; a dtype, one of fp32, fp16, bf16
        function: the activation; one of gelu, gelu_tanh, silu, relu, relu2

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def all_gather(
    x: Tensor,
    group: str,
    world: int,
    out: Tensor,
    *,
    plan: BoundPlan | None = None,
) -> None:
    """The columns of all ranks, in rank order.

    out [M, world * N] becomes the x [M, N] of the `world` ranks of `group` beside each other, that of rank 0 first.

    group: a name in `gristmill.kernels.collective.groups`; not used with a world of one. Every rank calls with the same shape.

    Written in place: out.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: columns of one rank; an integer of at least 1
        world: ranks; an integer of at least 1
        x: dtype of x and out; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def all_reduce(
    x: Tensor,
    group: str,
    world: int,
    *,
    plan: BoundPlan | None = None,
) -> None:
    """The sum of x over all ranks, in place.

    x [M, N] of each of the `world` ranks of `group` becomes their sum, in float32, in rank order, rounded once.

    group: a name in `gristmill.kernels.collective.groups`; not used with a world of one, whose sum is x. Every rank calls with the
    same shape.

    Written in place: x.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: row length (hidden size); an integer of at least 1
        world: ranks; an integer of at least 1
        x: dtype of x; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: str,
    world: int,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Residual += the sum of x over all ranks, then RMSNorm of the stored residual.

    `all_reduce` of x [M, N], then `fused_add_rms_norm` of the sum: residual [M, N] becomes sum + residual; returns its norm [M, N].

    The sum is rounded to the dtype before it is added, so that the result is that of the two operations in turn. Residual and weight
    [N] are the same on every rank. The output may be x itself.

    Written in place: residual.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: row length (hidden size); an integer of at least 1
        world: ranks; an integer of at least 1
        x: dtype of x, residual, weight and the output; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def all_to_all(
    x: Tensor,
    group: str,
    world: int,
    out: Tensor,
    *,
    plan: BoundPlan | None = None,
) -> None:
    """The columns that each rank has for this one, in rank order.

    out[:, s] of rank r becomes x[:, r] of rank s; both are [M, world, N].

    group: a name in `gristmill.kernels.collective.groups`; not used with a world of one. Every rank calls with the same shape.

    Written in place: out.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: columns from one rank to another; an integer of at least 1
        world: ranks; an integer of at least 1
        x: dtype of x and out; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def combine(
    y: Tensor,
    inverse: Tensor,
    weights: Tensor,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's expert rows.

    y [P, H], inverse int32 [T * K], weights float32 [T, K] -> [T, H] in y's dtype.

    out[t] = sum over k = 0, 1, ... of weights[t, k] * y[inverse[t * K + k]], in float32, rounded once. A negative place
    (an expert of another rank) adds nothing.

    Axes of its problems:
        m: tokens; an integer of at least 0
        top_k: experts per token; an integer of at least 1
        h: hidden size; an integer of at least 1
        x: dtype of y and the output; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def copy_blocks(
    source: Tensor,
    cache: Tensor,
    source_blocks: Tensor,
    cache_blocks: Tensor,
    factors: Tensor,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Blocks of another cache into a paged cache, with their hashes.

    source int32 [rows, source blocks, words]; cache int32 [rows, blocks, words], written in place; factors int64 [words].

    Block source_blocks[i] (int64 [T]) goes to block cache_blocks[i] in every row. No block of the cache is named twice. Returns the sums over
    the words of source · factors, modulo 2^64: int64 [rows, T].

    A block that is not there is an error: on a CPU it raises; a device kernel, which cannot raise without synchronising, reads and writes
    nothing.

    Written in place: cache.

    Axes of its problems:
        t: blocks; an integer of at least 0
        rows: parts of a block; an integer of at least 1
        words: words of 4 bytes of a part; an integer of at least 1

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Residual += x in place, then RMSNorm of the stored sum.

    x [..., N], residual [..., N] (becomes x + residual, rounded to its dtype), weight [N] in x's dtype or float32 -> normed [..., N].

    The norm is computed in float32 from the stored sum and rounded once. The output may be x itself.

    Written in place: residual.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: row length (hidden size); an integer of at least 1
        x: dtype of x, residual and the output; a dtype, one of fp32, fp16, bf16
        w: dtype of the weight; x: that of x; a dtype, one of x, fp32

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def gelu_and_mul(
    x: Tensor,
    approximate: str = "none",
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gelu(gate) · up of the two halves of each row.

    x [..., 2N], gate first -> gelu(x[..., :N]) · x[..., N:], [..., N] in x's dtype.

    gelu(g) = g · Φ(g), Φ being the distribution function of the normal distribution; with approximate = tanh it is
    g / 2 · (1 + tanh(√(2/π) · (g + 0.044715 g³))) (Hendrycks and Gimpel, 2016; Gemma). Computed in float64, as both sums cancel for negative
    gates, and rounded once.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: length of gate, of up, and of an output row; an integer of at least 1
        x: dtype of x and the output; a dtype, one of fp32, fp16, bf16
        approximate: formula of gelu; one of none, tanh

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def grouped_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    expert_offsets: Tensor,
    permutation: Tensor | None = None,
    top_k: int = 1,
    silu_mul: bool = False,
    n: int = 0,
    bias: Tensor | None = None,
    clamp: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows sorted by expert times their expert's weight, and its epilogue.

    x, a QuantTensor [E, N, K] (or one dense tensor, or a list of it), expert_offsets int32 [E + 1] -> [P, N or N / 2].

    Row p of expert e (expert_offsets[e] <= p < expert_offsets[e + 1]) is x[p] · W[e]ᵀ; with permutation int32 [P] it is
    x[permutation[p] // top_k] · W[e]ᵀ, so that x needs no gathering. bias [E, N], in x's dtype: bias[e] is added.
    silu_mul: then silu(first N / 2 columns) · the others. clamp, with silu_mul: instead g · sigmoid(alpha · g) · (u + 1), where
    g = min(gate, limit) and u = clamp(up, -limit, limit). float32 inside, rounded once to x's dtype. Rows past those of the last
    expert are 0, and their entries in permutation are not read. A scheme with an activation part quantizes x first, by that format's
    rule, a row at a time: nvfp4 has a multiplier for each row. Reads the offsets on the host.

    weight: One dense tensor; or, with a plan, the tensors of a layout that the plan reads. A QuantTensor is packed first
        (`gristmill.LinearWeight`, `gristmill.quant.pack`).

    Axes of its problems:
        m: sorted rows (tokens times top_k); an integer of at least 0
        e: experts; an integer of at least 1
        n: rows of an expert's W (gate and up together for silu_mul); an integer of at least 1
        k: columns of W; an integer of at least 1
        x: dtype of x and the output; a dtype, one of fp32, fp16, bf16
        w: how the weights are stored, and the format x is quantized to, if any; a quantization scheme name such as bf16, int4_g128 or
            fp8_block.fp8_g128
        epilogue: what follows the product; none or a +-joined subset of bias, silu_mul, clamp
        gather: top_k when rows of x are taken by permutation, 0 when x is sorted; an integer of at least 0
        act_order: columns belong to groups in any order (GPTQ's desc_act); true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def grouped_topk(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    *,
    plan: BoundPlan | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Expert choice: scores, groups, top-k, weights.

    logits [..., E], bias float32 [E] or None -> weights float32 [..., top_k], ids int32 [..., top_k].

    score = sigmoid(logit), or softmax over all E, in float32. choice = score + bias. A group (E / n_group neighbours)
    counts as the sum of its two best choices, or its best one without bias; the best topk_group groups are kept, and
    the best top_k experts among them are chosen. weight = score (without bias), divided by their sum + 1e-20 when
    renormalize, times scale.

    Order: descending choice; equal choices (and equal groups) go to the lower index. A NaN choice ranks as -inf, so ids are
    always top_k different experts of the kept groups; its weight stays NaN.

    Axes of its problems:
        m: tokens; an integer of at least 0
        e: experts; an integer of at least 1
        top_k: experts per token; an integer of at least 1
        n_group: groups of experts; an integer of at least 1
        topk_group: groups kept; an integer of at least 1
        x: dtype of the logits; a dtype, one of fp32, fp16, bf16
        scoring: score of a logit; one of sigmoid, softmax
        bias: a bias for the choice alone; true or false
        renormalize: weights of a token sum to scale; true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    residual: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """LayerNorm over the last dimension, of x or of residual += x.

    x [..., N], weight [N], bias [N] or None, residual [..., N] (becomes x + residual, rounded to its dtype) or None
    -> [..., N] in x's dtype; computed in float32 and rounded once. The output may be x itself, or the residual.

    The variance is the mean of the squares of x − mean(x), not the difference of two sums, which would cancel.

    Written in place: residual.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: row length (hidden size); an integer of at least 1
        x: dtype of x, weight, bias and the output; a dtype, one of fp32, fp16, bf16
        bias: whether a bias is added; true or false
        residual: whether x is added to a residual first; true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    n: int = 0,
    workspace: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x W^T with dense or quantized weights, and its epilogue.

    x [..., K] and a QuantTensor [N, K] (or a dense tensor, or a list of one) -> [..., N], [..., N / 2] with silu_mul.

    z = x · Wᵀ + bias; with silu_mul the first N / 2 rows of W are the gate and z = silu(gate) · up; y = z + residual.
    Everything in float32, with W dequantized in float32, and rounded once to x's dtype. A scheme with an activation
    part quantizes x first, by that format's rule.

    codes [..., K], scales float32 [rows, groups]: x as quantized in that format, as `rms_norm_quant` and `silu_and_mul_quant` write it
    (e4m3 or int8; scales [1, 1] of the tensor, or per row and group of columns). The values of x are not read then: it states the shape
    and the dtype of the result.

    weight: One dense tensor; or, with a plan, the tensors of a layout that the plan reads. A QuantTensor is packed first
        (`gristmill.LinearWeight`, `gristmill.quant.pack`).

    Axes of its problems:
        m: rows of x (tokens); an integer of at least 0
        n: rows of W (output features; gate and up together for silu_mul); an integer of at least 1
        k: columns of W (input features); an integer of at least 1
        x: dtype of x, bias, residual and the output; a dtype, one of fp32, fp16, bf16
        w: storage of the weight, and the format x is quantized to, if any; a quantization scheme name such as bf16, int4_g128 or
            fp8_block.fp8_g128
        epilogue: what follows the product; none or a +-joined subset of bias, residual, silu_mul
        act_order: columns belong to groups in any order (GPTQ's desc_act); true or false
        codes: x is given as codes and scales; true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def linear_fp32(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    workspace: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x W^T in float32, of x and W in 16 bits: logits of a router.

    x [..., K], W [N, K] in x's dtype or float32, bias float32 [N] -> float32 [..., N].

    Products of 16-bit numbers are exact in float32, and sums are as good as sums in float32: nothing is rounded to 16 bits.

    Axes of its problems:
        m: rows of x (tokens); an integer of at least 0
        n: rows of W (experts); an integer of at least 1
        k: columns of W (input features); an integer of at least 1
        x: dtype of x; a dtype, one of fp32, fp16, bf16
        w: dtype of W; x: that of x; a dtype, one of x, fp32
        bias: whether there is a bias; true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def logprobs(
    logits: Tensor,
    places: Tensor,
    ids: Tensor,
    k: int = 0,
    workspace: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of one token of a row and of its most likely ones.

    logits [rows, V], of which the rows places int64 [M] are read; ids int64 [id rows], whose element at a row's place is the row's token
    -> float32 [M, 1 + k], the log-probability of the token and those of the k most likely tokens, in order; int32 [M, 1 + k], how many tokens
    are
    likelier than the token, and the ids of the most likely ones, of equal ones the lower id first.

    A token of -1 has the log-probability NaN, and none is likelier. So it is with everything of a row with a NaN or +inf, or with nothing above
    -inf, whose ids are 0: such logits are an upstream fault.

    A place or token that is not there is an error: on a CPU it raises; a device kernel, which cannot raise without synchronising, reads nothing
    for
    it.

    Axes of its problems:
        m: rows that are read; an integer of at least 0
        v: vocabulary; an integer of at least 1
        k: most likely tokens of each row; an integer of at least 0
        x: dtype of the logits; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def merge_attention_states(
    a: Tensor,
    a_lse: Tensor,
    b: Tensor,
    b_lse: Tensor,
    *,
    plan: BoundPlan | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Two partial attentions into one, by log-sum-exp.

    a, b [T, H, D]; a_lse, b_lse float32 [T, H], natural logarithms -> out [T, H, D] in a's dtype, lse float32 [T, H].

    A partial result with lse −inf covers no key and adds nothing, even if its values are NaN. If both are −inf, out is
    zero and lse −inf. float32 inside, rounded once.

    Axes of its problems:
        t: tokens; an integer of at least 0
        h: heads; an integer of at least 1
        d: elements of a head; an integer of at least 1
        x: dtype of the partials and the output; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def mla_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    latent_dim: int = 512,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multi-head latent attention over a paged latent cache, absorbed; prefill and decode mixed.

    q [tokens, heads, latent_dim + rope], cache [blocks, block_size, latent_dim + rope], block_table int32 [seqs, max_blocks],
    query_start int32 [seqs + 1], seq_lens int32 [seqs] -> out [tokens, heads, latent_dim] in q's dtype, float32 inside.

    Sequence i has new tokens query_start[i] .. query_start[i+1], the last of its seq_lens[i] context tokens; causal.
    scale multiplies the scores. lse float32 [tokens, heads]: written in place, natural logarithm. max_q, max_ctx: host-known
    bounds. Rows of q past query_start[-1] belong to no sequence: what out and lse hold there is unspecified.

    Written in place: lse.

    Axes of its problems:
        q_tokens: new tokens of all sequences; an integer of at least 0
        seqs: sequences; an integer of at least 1
        max_q: bound on the new tokens of one sequence; an integer of at least 1
        max_ctx: bound on the context of one sequence, its new tokens included; an integer of at least 1
        total_ctx: contexts of all sequences together; an integer of at least 0
        heads: query heads; an integer of at least 1
        latent_dim: elements of the values, the first ones of the keys; an integer of at least 1
        rope_dim: rotated elements of the keys; an integer of at least 0
        block_size: tokens of a cache block; an integer of at least 1
        x: dtype of q, the cache and the output; a dtype, one of fp32, fp16, bf16
        lse: the log-sum-exp is written too; true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def moe(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor | Sequence[Tensor],
    w2: Tensor | Sequence[Tensor],
    inter: int = 0,
    workspace: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    clamp: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    expert_offsets: Tensor | None = None,
    permutation: Tensor | None = None,
    inverse: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Routed experts of each token: gate and up, activation, down, weighted sum.

    x [T, H], weights float32 [T, K], ids int32 [T, K], w13 QuantTensor [E, 2 I, H], w2 [E, H, I] -> [T, H] in x's dtype.

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

    w13, w2: One dense tensor; or, with a plan, the tensors of a layout that the plan reads. A QuantTensor is packed first
        (`gristmill.LinearWeight`, `gristmill.quant.pack`).

    Axes of its problems:
        m: tokens; an integer of at least 0
        top_k: experts per token; an integer of at least 1
        e: experts; an integer of at least 1
        h: hidden size; an integer of at least 1
        i: intermediate size of an expert; an integer of at least 1
        x: dtype of x and the output; a dtype, one of fp32, fp16, bf16
        w: how both weights are stored; a quantization scheme name such as bf16, int4_g128 or fp8_block.fp8_g128
        epilogue: what else follows the products; none or a +-joined subset of w13_bias, w2_bias, clamp
        act_order: columns belong to groups in any order (GPTQ's desc_act); true or false
        codes: x is given as codes and scales; true or false
        activation: between the products; one of silu, gelu, gelu_tanh, relu, relu2
        gated: whether w13 has gate and up, not up alone; true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softcap: float = 0.0,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention over a paged KV cache, prefill and decode mixed.

    q [tokens, heads, D], k_cache and v_cache [blocks, block_size, kv_heads, D], block_table int32 [seqs, max_blocks],
    query_start int32 [seqs + 1], seq_lens int32 [seqs] -> out [tokens, heads, D] in q's dtype, float32 inside.

    scale multiplies the scores. window: keys a query sees, itself included; 0 or less = all. sinks float32 [heads]: one more
    logit per head in the softmax, with no value (gpt-oss). lse float32 [tokens, heads]: written in place, the natural
    logarithm of the softmax's denominator, sink included. max_q, max_ctx: host-known bounds. A query that sees no key gives 0.
    Rows of q past query_start[-1] belong to no sequence: what out and lse hold there is unspecified.

    k_scale, v_scale: the scales of caches of e4m3 codes, float32 [1, 1, 1] (per tensor), [1, 1, kv_heads] (per head) or
    [blocks, block_size, kv_heads] (per token and head); None for caches of q's dtype. Keys are code · scale in float32.

    softcap: a score s becomes softcap · tanh(s / softcap), before the mask and without the sink's logit (Gemma 2); 0 = scores as they are.

    Written in place: lse.

    Axes of its problems:
        q_tokens: new tokens of all sequences; an integer of at least 0
        seqs: sequences; an integer of at least 1
        max_q: bound on the new tokens of one sequence; an integer of at least 1
        max_ctx: bound on the context of one sequence, its new tokens included; an integer of at least 1
        total_ctx: contexts of all sequences together; an integer of at least 0
        heads: query heads; an integer of at least 1
        kv_heads: KV heads; divides heads; an integer of at least 1
        head_dim: elements of a head; an integer of at least 1
        block_size: tokens of a cache block; an integer of at least 1
        x: dtype of q and the output; a dtype, one of fp32, fp16, bf16
        window: keys a query sees, itself included; 0 = all; an integer of at least 0
        sinks: one more softmax logit per head; true or false
        lse: the log-sum-exp is written too; true or false
        kv: dtype of the caches; x: the other tensors' dtype; a dtype, one of x, fp8
        kv_scale: scales of the caches: none, one per head (or tensor), one per token and head; one of none, head, token
        softcap: scores are limited by softcap · tanh(score / softcap); true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def permute(
    ids: Tensor,
    experts: int,
    *,
    plan: BoundPlan | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens sorted by expert: offsets, order and its inverse.

    ids int32 [T, K] -> expert_offsets int32 [experts + 1], permutation int32 [T * K], inverse int32 [T * K].

    Sorted place p holds flat entry permutation[p] = token * K + k; places of expert e are expert_offsets[e] up to
    expert_offsets[e + 1], in ascending entry. inverse[entry] is the place, or -1 for an id outside 0...experts - 1 (an
    expert of another rank): such entries follow those of the last expert.

    Axes of its problems:
        m: tokens; an integer of at least 0
        top_k: experts per token; an integer of at least 1
        e: experts; an integer of at least 1

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def process_logits(
    logits: Tensor,
    places: Tensor,
    fed: Tensor,
    slots: Tensor,
    penalties: Tensor,
    seen: Tensor,
    bias: Tensor,
    counted: Tensor,
    barred: Tensor,
    mask: Tensor,
    mask_rows: Tensor,
    *,
    plan: BoundPlan | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Biases, penalties, bans and grammars of chosen rows of logits.

    logits [rows, V], of which the rows places int64 [M] are processed -> float32 [M, V], and the largest of each `PART` columns.

    For each row, in this order:

    1. bias float32 [slots, V] (or [0, V]: none) of its slot, slots int32 [M], is added; -1 = it has no slot.
    2. penalties float32 [3, M], repetition r, frequency f and presence p, by seen int32 [slots, V] (or [0, V]: none), which is
       twice the number of times that a token is in the output, plus 1 if it is in the prompt. Tokens counted int32 [M, C] count once more, for
       this row alone: ids, -1 for none, and -2 for the one that the row is fed, fed int64 [fed rows] at its place. A token of the prompt or
       the output has its logit divided by r if it is positive, else multiplied by r; then f times its count is subtracted, and p if it
       is in the output.
    3. barred int32 [M, B, 2]: pairs (after, token); the token becomes -inf, if `after` is -1 or the token that the row is fed. Token -1 = no
    pair.
    4. mask int32 [masks, (V + 31) / 32], bit i of word w for token 32 w + i, of the row mask_rows int32 [M], -1 = none: tokens without a
       bit become -inf.

    largest float32 [2, M, parts]: of the logits as they came, and of the result, where NaN counts as +inf.

    A place, slot, token or mask that is not there is an error: on a CPU it raises; a device kernel, which cannot raise without
    synchronising, reads nothing for it.

    Axes of its problems:
        m: processed rows; an integer of at least 0
        v: vocabulary; an integer of at least 1
        x: dtype of the logits; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def qk_norm_rope_cache(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of the heads of q and k, rotary embedding, and the write into a paged cache, of a packed qkv.

    qkv [T, Hq + 2 Hk, D], the heads of q, then of k, then of v, of each token -> q [T, Hq, D], normalized and rotated.

    q_weight, k_weight: [D] in x's dtype or float32, RMSNorm of each head with eps; None: no norm. positions int64 [T] and
    cos_sin float32 [P, rot]: the first rot elements of a head are rotated, as in `rotary_embedding`. Keys and values of token t go
    to slot slot_mapping[t] of key_cache and value_cache [blocks, block_size, Hk, D], as in `reshape_and_cache`; −1 = not written.
    k_scale, v_scale: of caches of e4m3 codes, per tensor, per head, or per token and head (written).

    Written in place: key_cache, value_cache, k_scale, v_scale.

    Axes of its problems:
        t: tokens; an integer of at least 0
        heads: query heads; an integer of at least 1
        kv_heads: key and value heads; an integer of at least 1
        head_dim: elements of a head; an integer of at least 2
        rot: elements of a head that are rotated, its first ones; an integer of at least 2
        style: pairs: halves (neox) or neighbours (gptj); one of neox, gptj
        norm: whether heads of q and k are normalized; true or false
        block_size: tokens of a block; an integer of at least 1
        x: dtype of the projection and q; a dtype, one of fp32, fp16, bf16
        w: dtype of the weights of norms; x: that of x; a dtype, one of x, fp32
        kv: dtype of the caches; x: the other tensors' dtype; a dtype, one of x, fp8
        kv_scale: scales of the caches: none, one per head (or tensor), one per token and head; one of none, head, token

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
) -> None:
    """Keys and values of new tokens into a paged cache.

    key [T, H, D], value [T, H, Dv]; key_cache [blocks, block_size, H, D] and value_cache [..., H, Dv], written in place.

    Token t goes to slot slot_mapping[t] (int64): place slot % block_size of block slot // block_size; −1 = not written.

    k_scale, v_scale: None for caches of the tokens' dtype. Caches of e4m3 codes have float32 scales: [1, 1, 1] (per tensor) and
    [1, 1, H] (per head) are given; [blocks, block_size, H] (per token and head) are written with the codes, as
    max(amax, 1e-10) / 448. Codes are value / scale rounded to nearest even, saturated at ±448; NaN becomes 0x7F.

    Written in place: key_cache, value_cache, k_scale, v_scale.

    Axes of its problems:
        t: tokens; an integer of at least 0
        h: key and value heads; an integer of at least 1
        d: elements of a key head; an integer of at least 1
        dv: elements of a value head; an integer of at least 1
        block_size: tokens of a block; an integer of at least 1
        x: dtype of the tokens; a dtype, one of fp32, fp16, bf16
        kv: dtype of the caches; x: the other tensors' dtype; a dtype, one of x, fp8
        kv_scale: scales of the caches: none, one per head (or tensor), one per token and head; one of none, head, token

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def reshape_and_cache_mla(
    latent: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    plan: BoundPlan | None = None,
) -> None:
    """Latents of new tokens into MLA's paged cache.

    latent [T, D] (512 + 64 = 576 in DeepSeek); cache [blocks, block_size, D], written in place.

    Token t goes to slot slot_mapping[t] (int64): place slot % block_size of block slot // block_size; −1 = not written.

    Written in place: cache.

    Axes of its problems:
        t: tokens; an integer of at least 0
        d: elements of a latent, rotary part included; an integer of at least 1
        block_size: tokens of a block; an integer of at least 1
        x: dtype of latents and cache; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm over the last dimension.

    x [..., N], weight [N] in x's dtype or float32 -> [..., N] in x's dtype; computed in float32 and rounded once.

    A float32 weight is for models whose norms multiply by 1 + w (Gemma), which 16 bits do not hold.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: row length (hidden size); an integer of at least 1
        x: dtype of x and the output; a dtype, one of fp32, fp16, bf16
        w: dtype of the weight; x: that of x; a dtype, one of x, fp32

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def rms_norm_quant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    codes: Tensor,
    scales: Tensor,
    format: str,
    normed: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
) -> None:
    """RMSNorm over the last dimension to 8-bit codes and scales; with a residual, residual += x in place first.

    x [..., N], weight [N] -> codes [..., N] and scales float32 [rows, groups] of RMSNorm(x) · weight, written in place.

    residual [..., N]: becomes x + residual, rounded to its dtype, which is normalized instead of x; None: x is. format: fp8 (codes
    by the given scale [1, 1]), fp8_token, fp8_g128, int8_token, int8_g32 or int8_g128. The norm is rounded to x's dtype, then
    quantized by the rules of activations: the bits of rms_norm or fused_add_rms_norm, quantized.

    normed [..., N]: gets the norm itself; it may be x if there is a residual. None: it is not written.

    Written in place: residual, codes, scales, normed.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: length of an output row; an integer of at least 1
        x: dtype of x; a dtype, one of fp32, fp16, bf16
        q: dtype of the codes; a dtype, one of fp8, int8
        format: what shares a scale, and the codes; one of fp8, fp8_token, fp8_g128, int8_token, int8_g32, int8_g128
        residual: whether x is added to a residual first; true or false
        normed: the norm itself is written too; true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def rotary_embedding(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool = False,
    *,
    plan: BoundPlan | None = None,
) -> None:
    """Rotary position embedding of q and k, in place.

    q [T, Hq, D] and k [T, Hk, D] (or None), written in place; positions int64 [T]; cos_sin float32 [P, rot].

    Row p of cos_sin holds the cosines, then the sines, of position p (see `gristmill.kernels.rope.cache`). Computed in
    float32, rounded once. The rotated part of a token whose position is not in [0, P) becomes NaN.

    Written in place: q, k.

    Axes of its problems:
        t: tokens; an integer of at least 0
        hq: heads of q; an integer of at least 1
        hk: heads of k; 0 = only q is rotated; an integer of at least 0
        d: elements of a head; an integer of at least 2
        rot: elements of a head that are rotated, its first ones; an integer of at least 2
        style: pairs: halves (neox) or neighbours (gptj); one of neox, gptj
        x: dtype of q and k; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def route(
    logits: Tensor,
    top_k: int,
    local: int,
    first: int = 0,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    *,
    plan: BoundPlan | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Expert choice, and tokens sorted by expert: grouped_topk and permute.

    logits [M, E], bias float32 [E] or None -> weights float32 [M, top_k], ids int32 [M, top_k], expert_offsets int32 [local + 1],
    permutation int32 [M * top_k], inverse int32 [M * top_k].

    weights, and ids before `first` is subtracted, are those of `grouped_topk`. So expert e of this rank, which has `local` experts from
    `first` on, has the id e - first, and experts of other ranks have ids outside 0...local - 1. The others are `permute(ids, local)`: place
    p has entry permutation[p] = token * top_k + k, places of an expert are in ascending entry, and inverse is -1 for experts of other
    ranks, whose entries follow those of the last expert.

    Axes of its problems:
        m: tokens; an integer of at least 0
        e: experts; an integer of at least 1
        local: experts of this rank; an integer of at least 1
        top_k: experts per token; an integer of at least 1
        n_group: groups of experts; an integer of at least 1
        topk_group: groups kept; an integer of at least 1
        x: dtype of the logits; a dtype, one of fp32, fp16, bf16
        scoring: score of a logit; one of sigmoid, softmax
        bias: a bias for the choice alone; true or false
        renormalize: weights of a token sum to scale; true or false

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    index: Tensor,
    workspace: Tensor | None = None,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token per request: temperature, top-k, top-p, min-p, seeded Gumbel-max.

    logits [B, V]; for each request temperature, top_p, min_p float32 [B], top_k int32 [B], seed and index (the number of
    the output token) int64 [B] -> ids int64 [B].

    temperature below 1e-5: the largest logit, the lowest id among equals; the rest does not matter. Otherwise
    z = logit / temperature (a float32 division), filtered by `kept`, and the id is that of the largest
    z - log(-log(u)), in float64, u being the request's uniform of the token.

    A row with a NaN or +inf among its z (or logits, when greedy), or with nothing above -inf, gives -1: such logits are an
    upstream fault.

    Axes of its problems:
        m: requests; an integer of at least 0
        v: vocabulary; an integer of at least 1
        x: dtype of the logits; a dtype, one of fp32, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def silu_and_mul(
    x: Tensor,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Silu(gate) · up of the two halves of each row.

    x [..., 2N], gate first -> silu(x[..., :N]) · x[..., N:], [..., N] in x's dtype.

    silu(g) = g / (1 + e⁻ᵍ). Computed in float32 and rounded once, where a model's own code may round silu too.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: length of gate, of up, and of an output row; an integer of at least 1
        x: dtype of x and the output; a dtype, one of fp32, fp16, bf16

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def silu_and_mul_quant(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    format: str,
    *,
    plan: BoundPlan | None = None,
) -> None:
    """Silu(gate) · up of the two halves of each row, to 8-bit codes and scales.

    x [..., 2N], gate first -> codes [..., N] and scales float32 [rows, groups] of silu(x[..., :N]) · x[..., N:], written in place.

    format: fp8 (codes by the given scale [1, 1]), fp8_token, fp8_g128, int8_token, int8_g32 or int8_g128. The product is rounded to
    x's dtype, then quantized by the rules of activations: the bits of silu_and_mul, quantized.

    Written in place: codes, scales.

    Axes of its problems:
        m: rows (tokens); an integer of at least 0
        n: length of an output row; an integer of at least 1
        x: dtype of x; a dtype, one of fp32, fp16, bf16
        q: dtype of the codes; a dtype, one of fp8, int8
        format: what shares a scale, and the codes; one of fp8, fp8_token, fp8_g128, int8_token, int8_g32, int8_g128

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """

def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    context_start: Tensor,
    max_q: int,
    max_ctx: int,
    scale: float,
    lse: Tensor | None = None,
    window_left: int = -1,
    window_right: int = 0,
    *,
    plan: BoundPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over dense sequences of different lengths: causal (un-absorbed MLA prefill), bidirectional (encoders), windowed.

    q [tokens, heads, Dk], k [ctx, kv_heads, Dk], v [ctx, kv_heads, Dv], query_start and context_start int32 [seqs + 1]
    -> out [tokens, heads, Dv] in q's dtype, float32 inside.

    scale multiplies the scores. lse float32 [tokens, heads]: written in place, natural logarithm. max_q, max_ctx: host-known bounds.
    window_left, window_right: keys before and after its own that a query sees, -1 = all. Rows of q past query_start[-1] belong to no sequence:
    what out and lse hold there is unspecified.

    Written in place: lse.

    Axes of its problems:
        q_tokens: new tokens of all sequences; an integer of at least 0
        seqs: sequences; an integer of at least 1
        max_q: bound on the new tokens of one sequence; an integer of at least 1
        max_ctx: bound on the context of one sequence, its new tokens included; an integer of at least 1
        total_ctx: contexts of all sequences together; an integer of at least 0
        heads: query heads; an integer of at least 1
        kv_heads: KV heads; divides heads; an integer of at least 1
        qk_dim: elements of a query or key head; an integer of at least 1
        v_dim: elements of a value head; an integer of at least 1
        x: dtype of q, k, v and the output; a dtype, one of fp32, fp16, bf16
        lse: the log-sum-exp is written too; true or false
        window_left: keys before its own that a query sees; -1 = all; an integer of at least -1
        window_right: keys after its own that a query sees; -1 = all; an integer of at least -1

    plan: a BoundPlan from `gristmill.ops.bind`; None = found from the arguments and remembered.
    out: the tensor to write into and return, or a tuple of them; None = new. Operations without outputs have none. It shares no memory
        with the arguments, unless it is an argument of its shape, element for element.

    No gradient passes through an operation: a backward pass that comes to one is an error, and in a graph of torch.compile a warning.

    Raises:
        ValueError: shapes, strides or devices that do not fit each other, a plan of other calls or one that was released, or an out that
            shares memory with an argument.
        TypeError: a dtype that it does not take, or arguments of another number or name.
        NoKernelError: no kernel runs this here under the policy.
    """
