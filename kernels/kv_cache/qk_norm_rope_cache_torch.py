"""Norm, rotary embedding and cache write by torch: the reference itself, which does not synchronize."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.kv_cache.qk_norm_rope_cache import NAME, reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import QkNormRopeCacheCall


def launch(config: Config, call: QkNormRopeCacheCall) -> None:
    """The arguments of `qk_norm_rope_cache.reference`, then q [T, Hq, D]."""
    call.q.copy_(
        reference(
            call.qkv,
            call.q_weight,
            call.k_weight,
            call.eps,
            call.positions,
            call.cos_sin,
            call.key_cache,
            call.value_cache,
            call.slot_mapping,
            call.interleaved,
            call.k_scale,
            call.v_scale,
        )
    )


KERNEL = Kernel(
    op=NAME,
    name="qk_norm_rope_cache_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="norms, rotation and index_put_ in turn",
    supports=("w",),
    batch_invariant=True,
)
