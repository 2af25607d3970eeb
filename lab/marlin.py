"""vLLM's Marlin as a candidate beside our kernels, over the same codes and scales in its own order. Needs vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor

MARLIN = "marlin"


def marlin_refusal(text: str) -> str | None:
    """Why Marlin is not called for a weight in a scheme; None if it is."""
    scheme = QuantScheme.parse(text)
    if not (scheme.is_integer and scheme.bits == 4) or scheme.zero_points or scheme.activation:
        return f"called for symmetric int4 here, not {scheme}"
    return None


def marlin_packed(q: QuantTensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The codes and the scales, in x's dtype, of a weight in Marlin's order."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales

    assert q.codes is not None and q.scales is not None
    words = q.codes.view(torch.int32).T.contiguous()
    perm = torch.empty(0, dtype=torch.int32, device=words.device)
    codes = ops.gptq_marlin_repack(words, perm, q.k, q.n, 4)
    scales = q.scales.to(dtype).reshape(q.n, -1).T.contiguous()
    return [codes, marlin_permute_scales(scales, q.k, q.n, q.scheme.group_size or -1)]


@lru_cache(maxsize=1)
def _locks(device: torch.device, processors: int) -> torch.Tensor:
    """The workspace, which every call leaves zero."""
    return torch.zeros(processors * 4, dtype=torch.int32, device=device)


def marlin_call(
    packed: Sequence[Sequence[torch.Tensor]], x: torch.Tensor, out: torch.Tensor, processors: int
) -> Callable[[int], object]:
    """call(index) computes out from x and a copy of the weight, as vLLM's layers call it."""
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    space, none, (m, k), n = _locks(x.device, processors), (None,), x.shape, out.shape[1]

    def product(index: int) -> object:
        codes, scales = packed[index % len(packed)]
        # bias, scales of x, global scale, zero points, order of columns; whole K, no atomics, sums in float32
        kind, flags = scalar_types.uint4b8, (True, False, True, False)
        return ops.marlin_gemm(x, out, codes, None, scales, *none * 5, space, kind, m, n, k, *flags)

    return product
