"""``--attention-backend gristmill``: SGLang's attention layers on gristmill's kernels, over SGLang's pool of keys and values.

The pool of a layer is [slots, kv_heads, head_dim] for keys and the same for values, with one page of padding in front; a page is
``--page-size`` consecutive slots. Our operations read and write it as [pages, page_size, kv_heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from gristmill import ops
from gristmill.autotune.bound import BoundPlan
from gristmill.integrations.sizes import powers
from gristmill.kernels.common import dtype_name
from gristmill.runtime.errors import UsageError


@dataclass(frozen=True)
class Step:
    """A step, as `gristmill.ops.paged_attention` takes it. `max_q` and `max_ctx` are bounds that the host knows."""

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_q: int
    max_ctx: int


@dataclass(frozen=True)
class LayerPlans:
    """The plans of a layer with this `window`, the number of tokens that a query sees; 0 = all."""

    write: BoundPlan
    attend: BoundPlan
    window: int


class GristmillAttention(AttentionBackend):  # type: ignore[misc]  # SGLang is read without types
    """The attention of one model: causal, grouped queries, windows, sinks. CUDA graphs are refused when SGLang asks for them.

    Args:
        model_runner: SGLang's, with the model loaded and the pools made.

    Raises:
        UsageError: a pool or a layer that is not served, by name.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        _refuse_pool(pool, model_runner.dtype)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool, self.page_size = pool, pool.page_size
        self.step: Step | None = None
        self._device = self.req_to_token.device
        self._sizes = [*powers(max(1, model_runner.server_args.max_prefill_tokens))]
        self._plans: dict[tuple[Any, ...], LayerPlans] = {}
        for layer in model_runner.model.modules():
            if isinstance(layer, RadixAttention):
                _refuse_layer(layer)
                self._plans_of(layer, has_sinks=False)

    def _plans_of(self, layer: Any, has_sinks: bool) -> LayerPlans:
        window = layer.sliding_window_size + 1 if layer.sliding_window_size > -1 else 0
        heads, kv_heads, d = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        key = (heads, kv_heads, d, window, has_sinks)
        if key not in self._plans:
            size, x = self.page_size, dtype_name(self.token_to_kv_pool.dtype)
            write = f"h={kv_heads},d={d},dv={d},block_size={size},x={x}"
            attend = (
                f"heads={heads},kv_heads={kv_heads},head_dim={d},window={window},"
                f"sinks={str(has_sinks).lower()},block_size={size},x={x}"
            )
            self._plans[key] = LayerPlans(
                ops.bind("reshape_and_cache", write, self._device).prepare(self._sizes),
                ops.bind("paged_attention", attend, self._device).prepare(self._sizes),
                window,
            )
        return self._plans[key]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the tables of a step. UsageError: a step of speculative decoding."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            raise UsageError(
                "--attention-backend gristmill does not serve speculative decoding: leave out --speculative-algorithm"
            )
        rows = batch.seq_lens.shape[0]
        max_ctx = int(batch.seq_lens_cpu.max()) if rows else 1
        query_start = torch.zeros(rows + 1, dtype=torch.int32, device=self._device)
        if mode.is_decode_or_idle():
            torch.arange(rows + 1, out=query_start)
            max_q = 1
        else:
            torch.cumsum(batch.extend_seq_lens, 0, out=query_start[1:])
            max_q = max(batch.extend_seq_lens_cpu, default=1)
        pages = self.req_to_token[batch.req_pool_indices, : max_ctx : self.page_size] // self.page_size
        self.step = Step(query_start, batch.seq_lens.to(torch.int32), pages.to(torch.int32), max_q, max_ctx)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """UsageError: CUDA graphs are not served."""
        raise UsageError(
            "--attention-backend gristmill does not serve CUDA graphs: start SGLang with --disable-cuda-graph"
        )

    def forward_decode(self, *arguments: Any, **named: Any) -> Tensor:
        """One new token per request; see `forward_extend`."""
        return self.forward_extend(*arguments, **named)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [tokens, heads * head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim].

        Keys and values of the tokens are written to the pool first, if save_kv_cache.
        """
        step, tokens, d = self.step, q.shape[0], layer.qk_head_dim
        if step is None:
            raise RuntimeError("SGLang called the attention backend before init_forward_metadata")
        plans = self._plans_of(layer, sinks is not None)
        keys, values = self._pages(layer.layer_id)
        if save_kv_cache and k is not None and v is not None:
            shape = (-1, layer.tp_k_head_num, d)
            plans.write(
                k.view(shape), v.view(shape), keys, values, forward_batch.out_cache_loc.long(), None, None
            )
        out = q.new_empty(tokens, layer.tp_q_head_num, d)
        plans.attend(
            q.reshape(tokens, layer.tp_q_head_num, d),
            keys,
            values,
            step.block_table,
            step.query_start,
            step.seq_lens,
            step.max_q,
            step.max_ctx,
            float(layer.scaling),
            plans.window,
            None if sinks is None else sinks.float(),
            out=out,
        )
        return out.view(tokens, -1)

    def _pages(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer [pages, page_size, kv_heads, head_dim]; a slot past the last whole page belongs to no request."""
        pool, size = self.token_to_kv_pool, self.page_size
        keys, values = (
            buffer[: buffer.shape[0] // size * size].unflatten(0, (-1, size))
            for buffer in (pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id))
        )
        return keys, values

    def support_triton(self) -> bool:
        """SGLang may run its own Triton kernels around the attention."""
        return True


def _refuse_pool(pool: Any, dtype: torch.dtype) -> None:
    if not isinstance(pool, MHATokenToKVPool):
        what = f"a pool of {type(pool).__name__} (latent attention, hybrid windows or states)"
    elif pool.kv_cache_layout != "nhd":
        what = f"the cache layout {pool.kv_cache_layout}"
    elif pool.is_quantized_kv_cache or pool.dtype != dtype:
        what = f"a cache of {pool.dtype} for a model in {dtype} (--kv-cache-dtype)"
    else:
        return
    raise UsageError(f"--attention-backend gristmill does not serve {what}")


def _refuse_layer(layer: Any) -> None:
    _refuse(
        layer,
        {
            "cross attention": layer.is_cross_attention,
            f"attention of type {layer.attn_type.value}": layer.attn_type != AttentionType.DECODER,
            "a soft cap of the logits": layer.logit_cap > 0,
            "values of another width than keys": layer.v_head_dim != layer.qk_head_dim,
        }.items(),
    )


def _refuse(layer: Any, unserved: Iterable[tuple[str, bool]]) -> None:
    names = ", ".join(name for name, present in unserved if present)
    if names:
        raise UsageError(f"--attention-backend gristmill does not serve {names} (layer {layer.layer_id})")
