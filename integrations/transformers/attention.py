"""transformers' attention interfaces over our attention: one call per layer, padded batches and continuous batching included."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    flash_attention_mask,
)

from gristmill import ops
from gristmill.integrations.transformers.plans import plan_of

UPDATES_ARGUMENTS = "kwargs" in signature(PagedAttentionCache.update).parameters
"""Whether the paged cache takes the arguments of the attention as a whole and changes them, as in transformers 5.23; in 5.17 it
takes two lists of indices."""


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None, or bool [batch, keys] where the batch is padded: causality and windows are the kernel's. For attention in both directions never
    None, and with the attribute `both_directions`, so that `attention` can tell it from the mask of a causal model.

    Raises:
        NotImplementedError: a mask of another pattern (packed sequences, prefixes, chunks that end), or a static cache.
    """
    pattern = pattern_of(mask_function)
    size = kwargs.get("local_size")
    if pattern == "chunks" and size is not None and kv_length + kv_offset <= size:
        pattern = "causal"  # within the first chunk
    if pattern not in ("causal", "both directions"):
        raise NotImplementedError(
            "gristmill's attention is causal or sees both directions, with a window where the model has one; this model asks for another mask"
            + (
                f" (of chunks of {size} tokens, of which {kv_length + kv_offset} tokens are more)"
                if pattern == "chunks"
                else ""
            )
            + ": use attn_implementation='sdpa'"
        )
    if isinstance(q_offset, int) and kv_length + kv_offset > q_offset + q_length:
        raise NotImplementedError(
            f"gristmill's attention takes a cache that grows: this one has {kv_length} keys for position {q_offset + q_length}; "
            "use cache_implementation='dynamic'"
        )
    found: Tensor | None = flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    )
    if pattern == "both directions":
        padded = found is not None
        found = torch.ones(batch_size, kv_length, dtype=torch.bool) if found is None else found.bool()
        found.both_directions, found.padded = True, padded  # type: ignore[attr-defined]
    return found


def pattern_of(mask_function: Any) -> str | None:
    """What a mask function of transformers lets a token see: "causal" or "both directions", each also within a window, "chunks", or None for
    any other. transformers builds windows and chunks as the intersection of an overlay with one of the first two, which its closure holds."""
    overlays: tuple[Any, ...] = ()
    if getattr(mask_function, "__qualname__", "") == "and_masks.<locals>.and_mask":
        *overlays, mask_function = mask_function.__closure__[0].cell_contents
    names = [
        getattr(overlay, "__qualname__", "").removesuffix(".<locals>.inner_mask") for overlay in overlays
    ]
    if mask_function is causal_mask_function and names in ([], ["sliding_window_overlay"]):
        return "causal"
    if mask_function is bidirectional_mask_function and names in (
        [],
        ["sliding_window_bidirectional_overlay"],
    ):
        return "both directions"
    return "chunks" if mask_function is causal_mask_function and names == ["chunked_overlay"] else None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S, D], key [B, Hkv, S', D], value [B, Hkv, S', Dv] -> ([B, S, H, Dv], None).

    Args:
        attention_mask: the result of `mask`; on the left of S' or on its right, padding is left out.
        sliding_window: keys up to a token's own that it sees; in both directions, also from its own onwards.
        s_aux: sinks [H].
        softcap: soft cap of the scores (Gemma 2).

    Raises:
        NotImplementedError: what gristmill's attention does not compute; nothing is left out silently.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    refuse(dropout)
    batch, heads, steps, dim = query.shape
    keys = key.shape[2]
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[1] != keys):
        raise NotImplementedError(
            f"gristmill's attention takes a mask [batch, keys] = [{batch}, {keys}] of padding, got {list(attention_mask.shape)}"
        )
    if causal == getattr(attention_mask, "both_directions", not causal and attention_mask is None):
        raise NotImplementedError(
            f"{type(module).__name__} is {'' if causal else 'not '}causal and its mask is of {'both directions' if causal else 'a causal model'}: "
            "use attn_implementation='sdpa'"
        )
    if not causal and (steps != keys or s_aux is not None or softcap):
        raise NotImplementedError(
            f"gristmill's attention in both directions has no cross-attention, sinks or soft caps; {type(module).__name__} has {steps} queries "
            f"and {keys} keys{', sinks' * (s_aux is not None)}{', a soft cap' * bool(softcap)}: use attn_implementation='sdpa'"
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    scale = dim**-0.5 if scaling is None else float(scaling)
    if attention_mask is None or not getattr(attention_mask, "padded", True):
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
        first_q, first_k = (
            torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=q.device) for n in (steps, keys)
        )
        out = attend(
            q, k, v, first_q, first_k, steps, keys, scale, sliding_window or 0, s_aux, softcap or 0.0, causal
        )
        return out.view(batch, steps, heads, -1), None
    kept_keys = attention_mask.bool()
    kept = kept_keys[:, -steps:]
    found = attend(
        q[kept],
        k[kept_keys],
        v[kept_keys],
        _starts(kept),
        _starts(kept_keys),
        steps,
        keys,
        scale,
        sliding_window or 0,
        s_aux,
        softcap or 0.0,
        causal,
    )
    out = q.new_zeros(batch, steps, heads, found.shape[-1])
    out[kept] = found
    return out, None


def paged(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Continuous batching: query [1, H, tokens, D] of all sequences, keys and values read from transformers' paged cache.

    Raises:
        ValueError: a call without that cache. NotImplementedError: as for `attention`.
    """
    cache = kwargs.get("cache")
    if cache is None:
        raise ValueError("paged|gristmill is for continuous batching; use attn_implementation='gristmill'")
    refuse(dropout)
    window = int(getattr(module, "sliding_window", 0) or 0)
    window = window if window > 1 else 0
    if UPDATES_ARGUMENTS:
        key, value = cache.update(key, value, module.layer_idx, kwargs)
        key, value = (t[0].transpose(0, 1) for t in (key, value))
        longest_q, key_starts, longest = (
            kwargs[n] for n in ("max_length_q", "cu_seq_lens_k", "max_length_k")
        )
    else:
        key, value = cache.update(key, value, module.layer_idx, kwargs["read_index"], kwargs["write_index"])
        bounds = (kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"])
        kind = "sliding_attention" if window else "full_attention"
        key_starts, longest = (bound[kind] if isinstance(bound, dict) else bound for bound in bounds)
        longest_q = kwargs["max_seqlen_q"]
    q = query.transpose(1, 2).squeeze(0)
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = attend(
        q,
        key,
        value,
        kwargs["cu_seq_lens_q"].to(torch.int32),
        key_starts.to(torch.int32),
        int(longest_q),
        int(longest),
        scale,
        window,
        s_aux if s_aux is not None else getattr(module, "sinks", None),
        softcap or 0.0,
    )
    return out[None], None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    max_q: int,
    max_keys: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    softcap: float,
    causal: bool = True,
) -> Tensor:
    """q [tokens, H, D], k [ctx, Hkv, D], v [ctx, Hkv, Dv], starts int32 [sequences + 1] -> [tokens, H, Dv], causal from the end, or in both
    directions, without sinks and soft caps.

    With a window that matters, sinks, or a soft cap, keys are taken as a cache of blocks of one token.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if not causal:
        reach = window - 1 if window else -1
        windowed = (q, k, v, query_start, key_start, max_q, max_keys, scale, None, reach, reach)
        return ops.varlen_attention(
            *windowed, plan=plan_of("varlen_attention", (q, k, v), (reach,), windowed)
        )
    if sinks is None and not softcap and not 0 < window < max_keys:
        given = (q, k, v, query_start, key_start, max_q, max_keys, scale)
        return ops.varlen_attention(*given, plan=plan_of("varlen_attention", (q, k, v), (), given))
    lengths = key_start[1:] - key_start[:-1]
    steps = torch.arange(max_keys, dtype=torch.int32, device=q.device)
    table = (key_start[:-1, None] + steps).clamp(max=max(0, k.shape[0] - 1))
    blocks = (k[:, None], v[:, None], table)
    sinks = None if sinks is None else sinks.detach().float()
    paged = (q, *blocks, query_start, lengths, max_q, max_keys, scale, window, sinks)
    options = (None, None, None, None, float(softcap))
    plan = plan_of("paged_attention", (q, *blocks[:2]), (window, sinks is None, softcap > 0), paged + options)
    return ops.paged_attention(*paged, *options, plan=plan)


def refuse(dropout: float) -> None:
    """NotImplementedError for what our attention does not compute."""
    if dropout:
        raise NotImplementedError("gristmill's attention has no dropout: call model.eval()")


def _starts(kept: Tensor) -> Tensor:
    """int32 [batch + 1]: where each sequence begins among the kept tokens."""
    return torch.nn.functional.pad(kept.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
