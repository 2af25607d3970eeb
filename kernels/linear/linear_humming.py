"""Weight-only linear by humming (humming-kernels, Apache-2.0): CUDA kernels compiled at run time, in its own weight order.

The order is made by the library for the device at hand and has no inverse here, so it is no Layout, and plans do not
weigh its memory: the kernel runs when a policy pins it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme

WEIGHTS: dict[str, dict[str, Any]] = {
    **{f"int4_g{g}": {"dtype": "int4", "group_size": g} for g in (32, 64, 128)},
    **{f"int4_g{g}_zp": {"dtype": "int4", "group_size": g, "has_zero_point": True} for g in (32, 64, 128)},
    "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    "nvfp4": {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
    "fp8": {"dtype": "float8e4m3", "scale_type": "tensor"},
    "fp8_block": {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
}
"""Weight configurations of humming, by scheme. fp8_ch is not here: humming keeps its scales in bf16."""
SLOTS = ("weight", "weight_scale", "zero_point", "weight_scale_2")


def pack_weight(weight: Any) -> list[Any]:
    """A QuantTensor on a CUDA device -> the four tensors of SLOTS (empty = none), locks, and the layer's configuration.

    ValueError for what humming cannot hold: act-order, several segments, scales of another dtype than bf16, blocks cut.
    """
    import torch
    from humming.layer import HummingLayer

    name = weight.scheme.weights
    if name not in WEIGHTS:
        raise ValueError(f"humming: no configuration for {weight.scheme}; known: {', '.join(WEIGHTS)}")
    if weight.g_idx is not None or weight.n_idx is not None or len(weight.segments) != 1 or weight.lead:
        raise ValueError(f"humming: packs one [N, K] matrix without act-order, segments or cut blocks, got {weight}")
    if weight.scheme.is_integer and weight.scales.dtype != torch.bfloat16:
        raise ValueError(
            f"humming: integer scales must be bfloat16 for bfloat16 activations, got {weight.scales.dtype}"
        )
    tensors = {"weight": weight.codes.contiguous().view(torch.int32)}
    if weight.scheme.granularity == "tensor":
        tensors["weight_scale"] = weight.global_scale
    else:
        scales = weight.scales.contiguous()
        tensors["weight_scale"] = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    if weight.scheme.weight == "nvfp4":
        tensors["weight_scale_2"] = weight.global_scale
    if weight.zero is not None:
        tensors["zero_point"] = _packed_zeros(weight.zero)
    with torch.cuda.device(weight.device):
        layer = HummingLayer(weight.n, weight.k, dict(WEIGHTS[name]), torch_dtype=torch.bfloat16).to(weight.device)
        layer.load_from_tensors(tensors)
        layer.transform()
    made = [getattr(layer, slot, None) for slot in SLOTS]
    none = torch.empty(0, device=weight.device)
    text = torch.frombuffer(bytearray(layer.humming_config.to_str().encode()), dtype=torch.uint8)
    return [*(none if t is None else t.detach() for t in made), layer.locks, text]


def _packed_zeros(zero: Any) -> Any:
    """uint8 [N, G] zero points below 16 -> int32 [N / 8, G], eight rows a word."""
    import torch

    if zero.dtype != torch.uint8 or int(zero.max()) > 15 or zero.shape[0] % 8:
        raise ValueError("humming: zero points must be integers 0..15 and N a multiple of 8, "
                         f"got {zero.dtype} {tuple(zero.shape)}")  # fmt: skip
    words = torch.zeros(zero.shape[0] // 8, zero.shape[1], dtype=torch.int64, device=zero.device)
    for i in range(8):
        words |= zero[i::8].long() << (4 * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@lru_cache(maxsize=4096)
def _text(raw: bytes) -> str:
    return raw.decode()


def launch(
    config: Config, x: Any, weight: Any, bias: Any, residual: Any, silu_mul: bool, n: int, workspace: Any, out: Any
) -> None:
    """x [..., K] bf16, the six tensors of `pack_weight` -> out [..., N or N / 2]."""
    import torch
    from humming.ops import humming_gemm

    from gristmill.kernels.linear._epilogue import finish

    tensors = [t if t.numel() else None for t in weight[:4]]
    flat = x.reshape(-1, x.shape[-1])
    rows = out.shape[-1] * (2 if silu_mul else 1)
    plain = bias is None and residual is None and not silu_mul
    target = out.view(-1, rows) if plain else torch.empty(flat.shape[0], rows, dtype=x.dtype, device=x.device)
    humming_gemm(
        layer_config=_text(weight[5].numpy().tobytes()), inputs=flat, weight=tensors[0], weight_scale=tensors[1],
        zero_point=tensors[2], weight_scale_2=tensors[3], outputs=target, locks=weight[4],
    )  # fmt: skip
    if not plain:
        finish(target.view(*x.shape[:-1], rows), bias, residual, silu_mul, out)


def accepts(problem: Problem) -> str | None:
    """bf16 activations, weight-only schemes that humming holds exactly, tiles it can cut."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.name not in WEIGHTS:
        return f"holds {', '.join(WEIGHTS)}, not {scheme}"
    if problem.text("x") != "bf16":
        return f"wrapped for bf16 activations, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    n, k = problem.integer("n"), problem.integer("k")
    step = max(128, scheme.group_size or 0)
    return f"needs N a multiple of 128 and K of {step}, got N={n}, K={k}" if n % 128 or k % step else None


KERNEL = Kernel(
    op="linear",
    name="linear_humming",
    provider="humming",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement.any(
        {"mma.bf16"},
        vendors=("nvidia",),
        packages=(("humming-kernels", "0.1.19"),),
        offers=("humming.ops:humming_gemm", "humming.layer:HummingLayer"),
    ),
    summary="humming's run-time compiled GEMM for quantized weights",
    accepts=accepts,
    examples=("m=5,n=256,k=512,w=int4_g128", "m=33,n=128,k=256,w=int4_g64_zp", "m=64,n=384,k=256,w=fp8",
              "m=17,n=256,k=384,w=fp8_block,epilogue=bias", "m=9,n=128,k=256,w=mxfp4,epilogue=bias+silu_mul",
              "m=257,n=256,k=256,w=nvfp4,epilogue=residual"),
    sources=("_epilogue.py", "../activation/_silu_and_mul_triton.py"),
    deterministic=False,
    auto=False,
    priority=60,
    proven="",
)
