"""FlashMLA as vLLM has it: decodes over a paged latent cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run


def accepts(problem: Problem) -> str | None:
    if problem.integer("max_q") != 1 or problem["q_tokens"] != problem["seqs"]:
        return "called for decodes of one token"
    as_deepseek = problem.integers("latent_dim", "rope_dim", "block_size") == (512, 64, 64)
    return None if as_deepseek else "called for latents of 512 + 64 in pages of 64"


@lru_cache(maxsize=1)
def _metadata(lengths: torch.Tensor) -> Any:
    """One for all calls, as for all layers of a step."""
    from vllm.third_party.flashmla.flash_mla_interface import get_mla_metadata

    return get_mla_metadata()[0]


def bind(problem: Problem, arguments: Arguments) -> Run:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache

    q, cache, table, _, lengths = arguments[:5]
    scale, latent = arguments[7:9]
    metadata = _metadata(lengths)
    queries, pages = q.unsqueeze(1), cache.unsqueeze(2)

    def run() -> Any:
        return flash_mla_with_kvcache(queries, pages, table, lengths, latent, metadata, None, scale, True)

    run()  # the first call fills in the schedule
    return run


def output(arguments: Arguments, result: Any) -> list[torch.Tensor]:
    return [result[0].squeeze(1)]


PEER = Peer(
    name="flashmla",
    package="vllm",
    modules=("vllm.third_party.flashmla.flash_mla_interface",),
    adapters=(Adapter(op="mla_attention", accepts=accepts, bind=bind, outputs=output),),
)
