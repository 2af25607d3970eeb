"""FlashAttention-2 over a paged cache, as vLLM calls it on GPUs before Hopper, as a candidate beside our kernels. Needs vLLM with its library."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

FLASH_ATTENTION_2 = "flash_attention_2"
PAGE = 16
"""Tokens of a page must be a multiple of it."""


def flash_attention_2_is_here() -> bool:
    """Whether vLLM is installed with FlashAttention-2's library."""
    return find_spec("vllm") is not None and find_spec("vllm.vllm_flash_attn._vllm_fa2_C") is not None


def flash_attention_2_call(
    begin: torch.Tensor,
    contexts: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]:
    """call(q, k_cache, v_cache, block_table) computes `out`.

    Args:
        begin: int32 [sequences + 1], first new token of each sequence.
        contexts: int32 [sequences], their tokens, the new ones included.
        longest: most new tokens of a sequence, and the longest context.
        window: tokens that a token sees, itself included; 0 = all.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    sides = [window - 1, 0] if window else [-1, -1]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> object:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            longest[0],
            begin,
            longest[1],
            seqused_k=contexts,
            softmax_scale=scale,
            causal=True,
            window_size=sides,
            softcap=softcap,
            block_table=table,
            out=out,
            fa_version=2,
        )

    return call
