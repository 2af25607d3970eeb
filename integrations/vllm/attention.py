"""``--attention-backend CUSTOM``: vLLM's attention layers on gristmill's kernels, over vLLM's paged cache.

vLLM's cache of a layer is [blocks, kv_heads, block_size, 2 head_dim], K and V of a head side by side; in vLLM 0.24 it has the shape that
the backend chooses, [blocks, 2, block_size, kv_heads, head_dim]. Our operations read and write it through two strided views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from gristmill import ops
from gristmill.integrations.sizes import powers
from gristmill.integrations.vllm.decode_buffers import DecodeBuffers
from gristmill.kernels.common import dtype_name


class GristmillAttentionBackend(AttentionBackend):  # type: ignore[misc]  # vLLM is read without types
    """What vLLM asks about the backend: decoders with causal attention, grouped queries, windows and sinks; no quantized cache."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM has for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GristmillAttention]:
        """The class of a layer's attention."""
        return GristmillAttention

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """The class that makes the metadata of a step."""
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens per block."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Every memory order in which the numbers of a head are contiguous: ours first. Not called by vLLM 0.24."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The shape of a layer's cache. Only vLLM 0.24 calls it."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The shape's dimensions in memory, as they are; with layers, blocks come first. Called by vLLM 0.24 alone."""
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are served."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are served."""
        return True


@dataclass
class Metadata:
    """A step, as `gristmill.ops.paged_attention` takes it. `tokens` counts the tokens without padding; in a step of a CUDA graph, with it."""

    tokens: int
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_q: int
    max_ctx: int


class MetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # vLLM is read without types
    """Makes the metadata of a step, for the layers of one group of the cache. Prepares their kernels when it is made.

    Steps in which each request has one new token may be captured as a whole: their lengths are in `DecodeBuffers`, the block table and the
    slots are in vLLM's own persistent buffers.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.buffers = DecodeBuffers(vllm_config, device)
        self.max_ctx = vllm_config.model_config.max_model_len
        sizes = [*powers(vllm_config.scheduler_config.max_num_batched_tokens)]
        for layer in get_layers_from_vllm_config(vllm_config, Attention, layer_names).values():
            layer.impl.prepare(kv_cache_spec.block_size, kv_cache_spec.dtype, device, sizes)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """ValueError: attention that is not causal."""
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("gristmill's attention backend serves causal attention alone")
        query_start, seq_lens = common.query_start_loc, common.seq_lens
        if common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs:
            query_start, seq_lens = self.buffers.lengths(seq_lens)
        return Metadata(
            tokens=common.num_actual_tokens,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor,
            max_q=common.max_query_len,
            max_ctx=common.max_seq_len,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """The metadata that a graph is captured with: launches for contexts up to --max-model-len."""
        return replace(self.build(0, common_attn_metadata), max_ctx=self.max_ctx)


class GristmillAttention(AttentionImpl):  # type: ignore[misc]  # vLLM is read without types
    """One attention layer.

    ValueError: something that the kernels do not serve, by name.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        refuse(
            {
                "alibi_slopes": alibi_slopes is not None,
                "logits_soft_cap": bool(logits_soft_cap),
                f"attn_type {attn_type}": attn_type != AttentionType.DECODER,
                f"kv_cache_dtype {kv_cache_dtype}": kv_cache_dtype.startswith("fp8"),
            },
            "attention",
        )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale, self.kv_cache_dtype = head_size, float(scale), kv_cache_dtype
        self.window = sliding_window or 0
        self.sinks = None if sinks is None else sinks.float()
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def prepare(self, block_size: int, dtype: torch.dtype, device: torch.device, sizes: list[int]) -> None:
        """Bind the layer's plans, and resolve them for these numbers of tokens."""
        x, d = dtype_name(dtype), self.head_size
        write = f"h={self.num_kv_heads},d={d},dv={d},block_size={block_size},x={x}"
        attend = (
            f"heads={self.num_heads},kv_heads={self.num_kv_heads},head_dim={d},window={self.window},"
            f"sinks={str(self.sinks is not None).lower()},block_size={block_size},x={x}"
        )
        self.write = ops.bind("reshape_and_cache", write, device).prepare(sizes)
        self.attend = ops.bind("paged_attention", attend, device).prepare(sizes)

    def _views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [blocks, block_size, kv_heads, head_dim] of the cache."""
        if kv_cache.dim() == 5:  # vLLM 0.24
            return kv_cache[:, 0], kv_cache[:, 1]
        cache = kv_cache.transpose(1, 2)
        return cache[..., : self.head_size], cache[..., self.head_size :]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """key, value [tokens and padding, kv_heads, head_dim] into the cache; slots of -1 are not written."""
        tokens = slot_mapping.shape[0]
        self.write(key[:tokens], value[:tokens], *self._views(kv_cache), slot_mapping, None, None)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [tokens and padding, heads, head_dim] -> output. Without metadata, when vLLM measures memory, zeros."""
        if attn_metadata is None:
            return output.zero_()
        step, tokens = attn_metadata, attn_metadata.tokens
        k_cache, v_cache = self._views(kv_cache)
        self.attend(
            query[:tokens],
            k_cache,
            v_cache,
            step.block_table,
            step.query_start,
            step.seq_lens,
            step.max_q,
            step.max_ctx,
            self.scale,
            self.window,
            self.sinks,
            out=output[:tokens].view(tokens, self.num_heads, self.head_size),
        )
        return output


def refuse(unserved: Mapping[str, bool], what: str) -> None:
    """ValueError that names what of a layer is not served, if anything is."""
    names = ", ".join(name for name, present in unserved.items() if present)
    if names:
        raise ValueError(
            f"gristmill's {what} backend does not serve {names}: leave out --attention-backend CUSTOM"
        )
