"""A dense feed-forward block and experts side by side (Gemma 4): each reads the residual stream by a norm of its own, and each result is normalized
before both are added."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig, MoeConfig
from gristmill.runtime.layers.linear import PartialSum
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.norm import LayerNorm, RMSNorm, load_norm
from gristmill.runtime.layers.plans import Plans


class DenseAndExperts:
    """The block of a layer. The router reads the residual with a norm whose weights are those of the checkpoint over √hidden.

    Args:
        norm: before the dense block.
        dense: the dense block, which completes its sum over the ranks.
    """

    def __init__(
        self,
        c: ModelConfig,
        moe: MoeConfig,
        plans: Plans,
        weights: Weights,
        name: str,
        norm: RMSNorm | LayerNorm,
        dense: Callable[[Tensor], Tensor | PartialSum],
    ) -> None:
        self.norm, self.dense = norm, dense
        self.experts = MixtureOfExperts(moe, plans, weights, name)
        self.experts_norm, self.dense_post_norm, self.experts_post_norm = (
            load_norm(plans, weights, f"{name}.{part}", c)
            for part in ("experts_norm", "dense_post_norm", "experts_post_norm")
        )
        self.router_norm = RMSNorm(
            plans, weights.tensor(f"{name}.router.norm") * c.hidden_size**-0.5, c.rms_eps
        )

    def __call__(self, residual: Tensor) -> Tensor:
        """The residual stream [tokens, hidden], which is not written -> [tokens, hidden]."""
        dense = self.dense(self.norm(residual))
        routed = self.experts(self.experts_norm(residual), self.router_norm(residual))
        if isinstance(dense, PartialSum) or isinstance(routed, PartialSum):
            raise ValueError("a partial sum over ranks, which a norm takes complete")
        return self.dense_post_norm(dense).add_(self.experts_post_norm(routed))
