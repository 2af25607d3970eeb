"""Stand-ins for the libraries that lab.peers calls: their functions in plain torch, with the arguments that they have.

They say nothing of the libraries' results, only that the calls pass what they should.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor
from gristmill.quant.activations import quantize_activation
from lab.peers.libraries._fp8 import by_column
from tests.lab.test_linear_weight_only import vllm_modules

E4M3 = torch.float8_e4m3fn


def reference(op: str, *arguments: Any) -> Any:
    return default_registry().op(op).reference(*arguments)


def machete_prepack_B(words: Tensor, a_type: Any, b_type: Any, scales_type: Any) -> Tensor:
    assert (
        words.dtype == torch.int32 and words.stride(0) == 1 and b_type == "uint4b8" and a_type == scales_type
    )
    return words


def machete_mm(x: Tensor, words: Tensor, b_type: Any, b_group_scales: Tensor, b_group_size: int) -> Tensor:
    codes = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(-1, words.shape[1]) - 8
    return (x.float() @ (codes * b_group_scales.float().repeat_interleave(b_group_size, 0))).to(x.dtype)


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """A scale per element."""
    wide = scales.float()
    for dim in (0, 1):
        if wide.shape[dim] != shape[dim]:
            wide = wide.repeat_interleave(-(-shape[dim] // wide.shape[dim]), dim)
    return wide[: shape[0], : shape[1]]


def cutlass_scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    assert a.dtype == b.dtype == E4M3 and a.stride(1) == 1 and b.stride(0) == 1
    if scale_b.shape[0] > 1:
        assert scale_a.stride(0) == 1, "scales of blocks are stored by column"
    return (a.float() * spread(scale_a, a.shape) @ (b.float() * spread(scale_b, b.shape))).to(dtype)


def scaled_fp8_quant(x: Tensor, use_per_token_if_dynamic: bool) -> tuple[Tensor, Tensor]:
    quantized = quantize_activation(x, "fp8_token" if use_per_token_if_dynamic else "fp8")
    return quantized.values, quantized.scales


def per_token_group_quant_fp8(
    x: Tensor, group: int, column_major_scales: bool, use_ue8m0: bool, tma_aligned_scales: bool = False
) -> tuple[Tensor, Tensor]:
    assert column_major_scales and not use_ue8m0
    quantized = quantize_activation(x, f"fp8_g{group}")
    return quantized.values, by_column(quantized.scales, 4 if tma_aligned_scales else 1)


def fp8_gemm_nt(a: Any, b: Any, out: Tensor, is_deep_gemm_e8m0_used: bool) -> None:
    assert isinstance(a, tuple) and isinstance(b, tuple) and not is_deep_gemm_e8m0_used
    assert a[1].stride(1) % 4 == 0, "TMA copies columns of scales"
    out.copy_(cutlass_scaled_mm(a[0], b[0].t(), a[1], b[1].t(), out.dtype))


def m_grouped_bf16_gemm_nt_contiguous(a: Tensor, b: Tensor, out: Tensor, of_rows: Tensor) -> None:
    assert len(a) % 128 == 0 and of_rows.dtype == torch.int32 and of_rows.shape == (len(a),)
    tiles = of_rows.view(-1, 128)
    assert bool((tiles == tiles[:, :1]).all()), "a tile has one expert"
    out.copy_(torch.stack([row.float() @ b[int(e)].float().t() for row, e in zip(a, of_rows, strict=True)]))


def scaled_mm(
    a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **_: Any
) -> Tensor:
    """torch._scaled_mm with scales per block of 1 x 128 and 128 x 128, which the CPU has not."""
    assert scale_a.stride(0) == 1 and scale_b.stride(0) == 1 and scale_b.stride(1) % 4 == 0
    return cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype)


def multiply(x: Tensor, w: Tensor, x_scales: Tensor, w_scales: Tensor, out: Tensor) -> None:
    """Of lab.peers.libraries._cutedsl_fp8."""
    out.copy_(cutlass_scaled_mm(x, w.t(), x_scales, w_scales.t(), out.dtype))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    block_table: Tensor | None = None,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    fa_version: int,
    s_aux: Tensor | None = None,
) -> Tensor:
    assert causal and fa_version == 3 and num_splits == 0 and scheduler_metadata in (None, softcap > 0)
    bounds = max_seqlen_q, max_seqlen_k, softmax_scale
    if block_table is None:
        return reference("varlen_attention", q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds)
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    sinks = None if s_aux is None else s_aux.float()
    rest = (window_size[0] + 1, sinks, None, None, None, None, softcap)
    result: Tensor = reference(
        "paged_attention", q, k, v, block_table, cu_seqlens_q, seqused_k, *bounds, *rest
    )
    return result


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    *,
    qkv_dtype: torch.dtype,
    cu_seqlens_q: Tensor,
    page_size: int,
    causal: bool,
    window_size: tuple[int, int],
    has_softcap: bool = False,
) -> bool:
    """Whether it is for a soft cap."""
    assert (
        qkv_dtype == torch.bfloat16
        and len(cache_seqlens) == batch_size
        and (num_heads_q, num_heads_kv, headdim, page_size)
        == (
            4,
            2,
            64,
            16,
        )
    )
    return has_softcap


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    num_splits: int = 1,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """[sequences, tokens, heads, D], and the log-sum-exp."""
    from gristmill.kernels.attention.causal import causal_attention

    assert causal and num_splits in (0, 1)
    parts = [causal_attention(*one, softmax_scale, softcap=softcap)[0] for one in zip(q, k, v, strict=True)]
    return torch.stack(parts).to(q.dtype), None


def flash_mla_with_kvcache(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    latent: int,
    metadata: Any,
    splits: None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, None]:
    assert cache.dim() == 4 and metadata == "metadata" and splits is None and causal
    begin = torch.arange(len(q) + 1, dtype=torch.int32)
    bounds = (1, int(lengths.max()), scale, latent)
    out = reference("mla_attention", q[:, 0], cache[:, :, 0], table, begin, lengths, *bounds)
    return out[:, None], None


def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    quant_config: Any = None,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
) -> Tensor:
    assert int(ids.min()) >= 0
    if expert_map is not None:
        assert len(expert_map) == global_num_experts
        ids = expert_map[ids.long()]
    pair: list[Any] = [w13, w2]
    if quant_config is not None:
        scheme = QuantScheme.parse("fp8_block.fp8_g128")
        pair = [
            QuantTensor(codes.view(torch.uint8), scales, tuple(codes.shape), scheme)
            for codes, scales in zip(pair, quant_config, strict=True)
        ]
    else:
        pair = [QuantTensor.from_dense(weight) for weight in pair]
    return reference("moe", x, weights, ids, *pair)


def fp8_w8a8_moe_quant_config(w13: Tensor, w2: Tensor, block_shape: list[int]) -> tuple[Tensor, Tensor]:
    assert block_shape == [128, 128]
    return w13, w2


def gptq_marlin_moe_repack(words: Tensor, perm: Tensor, k: int, n: int, bits: int) -> Tensor:
    assert words.shape[1:] == (k // 8, n) and perm.shape == (len(words), 0) and bits == 4
    return words


def marlin_moe_permute_scales(scales: Tensor, k: int, n: int, group: int) -> Tensor:
    assert scales.shape[1:] == (k // group, n)
    return scales


def fused_marlin_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    s13: Tensor,
    s2: Tensor,
    weights: Tensor,
    ids: Tensor,
    kind: str,
    *,
    moe_sum: Any,
    output: Tensor,
    activation: Any = None,
    clamp_limit: float = 0.0,
    gemm1_alpha: float = 0.0,
    gemm1_beta: float = 0.0,
) -> None:
    assert moe_sum == "moe_sum"
    if kind == "float4_e2m1f":
        assert activation == "SWIGLUOAI_UNINTERLEAVE" and gemm1_beta == 1.0
        pair = [mxfp4(codes, scales) for codes, scales in ((w13, s13), (w2, s2))]
        extra = (0, None, bias13, bias2, True, gemm1_alpha, clamp_limit)
    else:
        assert kind == "uint4b8" and bias13 is bias2 is None
        pair = [int4(words, scales) for words, scales in ((w13, s13), (w2, s2))]
        extra = (0, None)
    output.copy_(reference("moe", x, weights, ids, *pair, *extra))


def int4(words: Tensor, scales: Tensor) -> QuantTensor:
    """Of words [E, K / 8, N] and scales [E, K / 128, N]."""
    codes = words.transpose(1, 2).contiguous().view(torch.uint8)
    shape = (words.shape[0], words.shape[2], words.shape[1] * 8)
    return QuantTensor(
        codes, scales.transpose(1, 2).float().contiguous(), shape, QuantScheme.parse("int4_g128")
    )


def mxfp4(codes: Tensor, scales: Tensor) -> QuantTensor:
    return QuantTensor(codes, scales, (*codes.shape[:2], codes.shape[2] * 2), QuantScheme.parse("mxfp4"))


def prepare_moe_mxfp4_layer_for_marlin(
    layer: Any, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor, b13: Tensor, b2: Tensor
) -> tuple[Tensor, ...]:
    assert layer.params_dtype == b13.dtype == torch.bfloat16
    return w13, w2, s13, s2, b13, b2


def mxfp4_w4a16_moe_quant_config(w13: Any, w2: Any, b13: Tensor, b2: Tensor) -> Any:
    assert b13.dtype == b2.dtype == torch.float32
    return SimpleNamespace(scales=(w13.weight_scale, w2.weight_scale), biases=(b13, b2))


def triton_kernel_fused_experts(
    out: Tensor, x: Tensor, w13: Tensor, w2: Tensor, *routing: Any, topk: int, quant_config: Any
) -> Tensor:
    (ids, weights, experts), (s13, s2), (b13, b2) = routing, quant_config.scales, quant_config.biases
    assert ids.dtype == torch.int64 and ids.shape[1] == topk and len(w13) == experts
    apart = torch.cat((torch.arange(0, w13.shape[1], 2), torch.arange(1, w13.shape[1], 2)))
    pair = (mxfp4(w13[:, apart].contiguous(), s13[:, apart].contiguous()), mxfp4(w2, s2))
    biases = (b13[:, apart].to(x.dtype), b2.to(x.dtype))
    return out.copy_(reference("moe", x, weights, ids.int(), *pair, 0, None, *biases, True, 1.702, 7.0))


def grouped_topk(
    logits: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    renormalize: bool,
    scale: float,
    bias: Tensor,
    scoring: int,
) -> tuple[Tensor, Tensor]:
    """In another order than the operation's."""
    assert scoring == 1
    found = reference("grouped_topk", logits, top_k, bias, n_group, topk_group, "sigmoid", renormalize, scale)
    return found[0].flip(-1), found[1].flip(-1)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    x.copy_(reference("fused_add_rms_norm", x, residual, weight, eps))


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(reference("rms_norm", x, weight, eps))


def apply_top_k_top_p_triton(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    from gristmill.kernels.sampling.sample import kept

    keep = kept(logits, top_k, top_p, torch.zeros_like(top_p))
    return logits.masked_fill_(~keep, -torch.inf)


class Wrapper:
    """FlashInfer's wrappers of a paged cache."""

    def __init__(self, space: Tensor, layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert layout == "NHD" and space.dtype == torch.uint8
        assert not use_tensor_cores, "they are for groups of four query heads and more"

    def plan(self, *plan: Any, **options: Any) -> None:
        self.planned, self.options = plan, options

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        plan = self.planned
        begin = plan[0] if self.options.get("causal") else torch.arange(len(q) + 1, dtype=torch.int32)
        first, pages, last, *sizes = plan[-7:]
        assert sizes == [q.shape[1], caches[0].shape[2], q.shape[2], caches[0].shape[1]]
        table, lengths = table_of(first, pages, last, sizes[3])
        bounds = (q.shape[0], int(lengths.max()), self.options["sm_scale"], self.options["window_left"] + 1)
        rest = (None, None, None, None, None, self.options.get("logits_soft_cap", 0.0))
        return reference("paged_attention", q, *caches, table, begin, lengths, *bounds, *rest)


def table_of(first: Tensor, pages: Tensor, last: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The block table and the lengths."""
    counts = first.diff()
    table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
    for row, part in zip(table, pages.split(counts.tolist()), strict=True):
        row[: len(part)] = part
    return table, ((counts - 1) * block + last).int()


class MlaWrapper(Wrapper):
    def run(self, q: Tensor, rope: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
        begin, first, pages, lengths, heads, latent, width, block, causal, scale, *_ = self.planned
        assert (heads, latent, width, causal) == (q.shape[1], q.shape[2], rope.shape[2], True)
        table, _ = table_of(first, pages, torch.ones(len(lengths)), block)
        bounds = (1, int(lengths.max()), scale, latent)
        cache = torch.cat((latents, ropes), -1)
        return reference("mla_attention", torch.cat((q, rope), -1), cache, table, begin, lengths, *bounds)


class RaggedWrapper(Wrapper):
    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin, context, heads, kv_heads, width, v_width = self.planned
        assert (heads, kv_heads, width, v_width) == (*q.shape[1:2], *k.shape[1:], v.shape[2])
        bounds = (len(q), len(k), self.options["sm_scale"])
        return reference("varlen_attention", q, k, v, begin, context, *bounds)


def top_k_top_p_sampling_from_probs(
    probabilities: Tensor, top_k: Tensor, top_p: Tensor, filter_apply_order: str
) -> Tensor:
    assert filter_apply_order == "top_k_first"
    return probabilities.argmax(-1).int()


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference("rms_norm", x, weight, eps)


OPS = (
    machete_prepack_B,
    machete_mm,
    cutlass_scaled_mm,
    scaled_fp8_quant,
    gptq_marlin_moe_repack,
    grouped_topk,
    fused_add_rms_norm,
    rms_norm,
)
QUANTIZATION = "vllm.model_executor.layers.quantization.utils"
EXPERTS = "vllm.model_executor.layers.fused_moe"
MODULES: dict[str, dict[str, Any]] = {
    f"{QUANTIZATION}.fp8_utils": {"per_token_group_quant_fp8": per_token_group_quant_fp8},
    f"{QUANTIZATION}.marlin_utils_fp4": {
        "prepare_moe_mxfp4_layer_for_marlin": prepare_moe_mxfp4_layer_for_marlin
    },
    f"{QUANTIZATION}.mxfp4_utils": {"_swizzle_mxfp4": lambda codes, scales: (codes, "flex", scales)},
    "vllm.utils.deep_gemm": {"fp8_gemm_nt": fp8_gemm_nt},
    "vllm.third_party.deep_gemm": {"m_grouped_bf16_gemm_nt_contiguous": m_grouped_bf16_gemm_nt_contiguous},
    "lab.peers.libraries._cutedsl_fp8": {"multiply": multiply},
    "vllm.vllm_flash_attn.flash_attn_interface": {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "get_scheduler_metadata": get_scheduler_metadata,
    },
    "vllm.third_party.flashmla.flash_mla_interface": {
        "flash_mla_with_kvcache": flash_mla_with_kvcache,
        "get_mla_metadata": lambda: ("metadata", None),
    },
    f"{EXPERTS}.fused_moe": {"fused_experts": fused_experts},
    f"{EXPERTS}.config": {
        "fp8_w8a8_moe_quant_config": fp8_w8a8_moe_quant_config,
        "mxfp4_w4a16_moe_quant_config": mxfp4_w4a16_moe_quant_config,
    },
    f"{EXPERTS}.activation": {
        "MoEActivation": SimpleNamespace(SWIGLUOAI_UNINTERLEAVE="SWIGLUOAI_UNINTERLEAVE")
    },
    f"{EXPERTS}.experts.marlin_moe": {"fused_marlin_moe": fused_marlin_moe},
    f"{EXPERTS}.experts.gpt_oss_triton_kernels_moe": {
        "make_routing_data": lambda ids, weights, experts: (ids, weights, experts),
        "triton_kernel_fused_experts": triton_kernel_fused_experts,
    },
    "triton_kernels.matmul_ogs": {
        "FlexCtx": SimpleNamespace,
        "PrecisionConfig": SimpleNamespace,
    },
    "vllm.v1.sample.ops.topk_topp_triton": {"apply_top_k_top_p_triton": apply_top_k_top_p_triton},
    "flash_attn.cute": {"flash_attn_func": flash_attn_func},
    "flashinfer": {
        "BatchDecodeWithPagedKVCacheWrapper": Wrapper,
        "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
        "BatchPrefillWithRaggedKVCacheWrapper": RaggedWrapper,
        "mla": SimpleNamespace(BatchMLAPagedAttentionWrapper=MlaWrapper),
        "sampling": SimpleNamespace(top_k_top_p_sampling_from_probs=top_k_top_p_sampling_from_probs),
        "fused_add_rmsnorm": fused_add_rms_norm,
        "rmsnorm": rmsnorm,
    },
}


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all of them where they are imported from."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    vllm_modules(monkeypatch)
    for name, content in MODULES.items():
        parts = name.split(".")
        for module in (".".join(parts[: i + 1]) for i in range(len(parts))):
            if module not in sys.modules:
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[name]).update(content)
        for i in range(1, len(parts)):
            monkeypatch.setattr(
                sys.modules[".".join(parts[:i])],
                parts[i],
                sys.modules[".".join(parts[: i + 1])],
                raising=False,
            )
    custom = sys.modules["vllm"]._custom_ops
    vars(custom).update({function.__name__: function for function in OPS}, moe_sum="moe_sum")
    kinds = sys.modules["vllm.scalar_type"].scalar_types
    kinds.uint4b8 = KIND
    kinds.float4_e2m1f = SimpleNamespace(id="float4_e2m1f")
    vars(sys.modules[f"{QUANTIZATION}.marlin_utils"])["marlin_moe_permute_scales"] = marlin_moe_permute_scales


class Kind(str):
    """A type of vLLM's with its id."""

    @property
    def id(self) -> str:
        return str(self)


KIND = Kind("uint4b8")
