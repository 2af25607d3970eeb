"""Quantized weights for tests, verification and benchmarks: including weights that tensor parallelism has sliced inside a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.scheme import QuantScheme, cdiv

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gristmill.kernels.random_inputs import Draw
    from gristmill.quant.tensor import QuantTensor


def misfit(scheme: str, k: int, act_order: bool) -> str | None:
    """Why a weight of `scheme` with k columns cannot have act-order; None if it can."""
    if act_order and QuantScheme.parse(scheme).granularity not in ("group", "block"):
        return (
            f"act_order orders groups of columns, and {scheme} has none; expected a scheme such as int4_g128"
        )
    if act_order and k < 2:
        return f"act_order needs at least 2 columns to order, got k={k}"
    return None


def quantized(
    weight: Tensor, scheme: QuantScheme, act_order: bool, generator: torch.Generator
) -> QuantTensor:
    """weight [..., N, K], rounded to nearest, as a QuantTensor. K need not be a multiple of the group.

    Other values of K result from slicing columns: the weight is quantized with a complete last group and sliced.
    With act_order, integer groups are in random order; other formats, and few columns, are sliced inside the first group.
    """
    import torch
    from torch.nn.functional import pad

    from gristmill.quant.rtn import quantize

    k, size = weight.shape[-1], scheme.group_size or weight.shape[-1]
    if act_order and scheme.is_integer and k > size:
        padded_k = cdiv(k, size) * size
        order = torch.randperm(padded_k, generator=generator).to(weight.device)
        full = quantize(
            pad(weight, (0, padded_k - k)),
            scheme,
            g_idx=torch.arange(padded_k, device=weight.device)[order] // size,
        )
        start = 0
    else:
        start = size - min(size, k) // 2 if act_order else 0
        multiple = size if act_order else scheme.requires_k_multiple
        padded_k = cdiv(start + k, multiple) * multiple
        full = quantize(pad(weight, (start, padded_k - start - k)), scheme)
    return full if padded_k == k else full.narrow(-1, start, k)


def random_weight(draw: Draw, *shape: int) -> QuantTensor:
    """A QuantTensor [..., N, K] in the scheme of axis w, with act_order if that is set. Its rows have very different sizes, so that
    a wrong row, group or scale is detected."""
    problem, k = draw.problem, shape[-1]
    values = draw.normal(*shape).to(draw.device)
    sizes = ((0.5 * draw.normal(*shape[:-1], 1)).exp() / k**0.5).to(draw.device)
    scheme = QuantScheme.parse(problem.text("w"))
    return quantized(values * sizes, scheme, bool(problem["act_order"]), draw.generator)
