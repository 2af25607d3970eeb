"""``--attention-backend CUSTOM`` for multi-head latent attention (DeepSeek-V2, 2024): decoding on gristmill's kernels.

vLLM's layer absorbs W_UK into the query and applies W_UV to the result; in between, every head attends to the rows of one latent cache
[blocks, block_size, kv_lora_rank + qk_rope_head_dim]. That part, and the writes to the cache, are gristmill's. Prompts stay with the
prefill backend that vLLM chooses (``mla_prefill_backend``), over the same cache.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from gristmill import ops
from gristmill.integrations.sizes import powers
from gristmill.integrations.vllm.attention import refuse
from gristmill.integrations.vllm.decode_buffers import DecodeBuffers
from gristmill.kernels.common import dtype_name


class GristmillMLABackend(MLACommonBackend):  # type: ignore[misc]  # vLLM is read without types
    """What vLLM asks about the backend: any latent size, caches in the dtype of the model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM has for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GristmillMLA]:
        """The class of a layer."""
        return GristmillMLA

    @staticmethod
    def get_builder_cls() -> type[MLAMetadataBuilder]:
        """The class that makes the metadata of a step."""
        return MLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """[]: every size. vLLM's own metadata takes 320, 512 (since 0.25) and 576."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens per block."""
        return [MultipleOf(16)]


class MLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]  # vLLM is read without types
    """vLLM's metadata of a step. Requests with one new token are decoded, all others are prompts. Prepares the kernels of the layers.

    Steps of decoding alone may be captured as a whole: their lengths are in `DecodeBuffers`.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        self.buffers = DecodeBuffers(vllm_config, device)
        self.max_ctx = vllm_config.model_config.max_model_len
        for name in layer_names:
            vllm_config.compilation_config.static_forward_context[name].impl.prepare(
                kv_cache_spec.block_size,
                kv_cache_spec.dtype,
                device,
                decode_sizes=[*powers(scheduler.max_num_seqs)],
                write_sizes=[*powers(scheduler.max_num_batched_tokens)],
            )

    def build(self, *arguments: Any, **named: Any) -> MLACommonMetadata:
        """vLLM's, with the lengths of the requests that are decoded where a graph reads them."""
        metadata = super().build(*arguments, **named)
        decode = metadata.decode
        if decode is not None and metadata.num_decodes == metadata.num_decode_tokens == metadata.num_reqs:
            metadata.query_start_loc, decode.seq_lens = self.buffers.lengths(decode.seq_lens)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        """The metadata that a graph is captured with: launches for contexts up to --max-model-len."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.max_seq_len = self.max_ctx
        return metadata


class GristmillMLA(MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]  # vLLM is read without types
    """One layer of latent attention.

    ValueError: something that the kernels do not serve, by name.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **of_latents: Any,
    ) -> None:
        refuse(
            {
                "alibi_slopes": alibi_slopes is not None,
                "sliding_window": sliding_window is not None,
                "logits_soft_cap": bool(logits_soft_cap),
                f"attn_type {attn_type}": attn_type != AttentionType.DECODER,
                f"kv_cache_dtype {kv_cache_dtype}": kv_cache_dtype not in ("auto", "float16", "bfloat16"),
                "sparse attention": of_latents.get("indexer") is not None,
            },
            "latent attention",
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **of_latents,
        )

    def prepare(
        self,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        decode_sizes: list[int],
        write_sizes: list[int],
    ) -> None:
        """Bind the plans of the layer, and resolve them for these numbers of decoded and of written tokens."""
        x, latent = dtype_name(dtype), self.kv_lora_rank
        write = f"d={self.head_size},block_size={block_size},x={x}"
        attend = (
            f"heads={self.num_heads},latent_dim={latent},rope_dim={self.head_size - latent},"
            f"block_size={block_size},x={x}"
        )
        self.write = ops.bind("reshape_and_cache_mla", write, device).prepare(write_sizes)
        self.attend = ops.bind("mla_attention", attend, device).prepare(decode_sizes)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """kv_c_normed [tokens and padding, kv_lora_rank], k_pe [tokens and padding, 1, rope] into the cache; slots of -1 are not written."""
        if kv_cache.numel() == 0:  # vLLM measures memory
            return
        slots = slot_mapping.flatten()
        tokens = slots.shape[0]
        latent = torch.cat([kv_c_normed[:tokens], k_pe[:tokens].reshape(tokens, -1)], -1)
        self.write(latent, kv_cache, slots)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """q [decodes, heads, kv_lora_rank + rope], or its two parts -> out [decodes, heads, kv_lora_rank], and no log-sum-exp."""
        query = q if isinstance(q, Tensor) else torch.cat(q, -1)
        step = attn_metadata.decode
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        self.attend(
            query,
            kv_c_and_k_pe_cache,
            step.block_table,
            attn_metadata.query_start_loc[: attn_metadata.num_decodes + 1],
            step.seq_lens,
            1,
            attn_metadata.max_seq_len,
            self.scale,
            self.kv_lora_rank,
            out=out,
        )
        return out, None
