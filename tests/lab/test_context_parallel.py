"""The time of a step is that of a step in which all requests run."""

from __future__ import annotations

import pytest

from gristmill import LLM
from gristmill.runtime.scheduler import Request, Scheduler, SchedulerConfig
from lab import context_parallel
from tests.runtime.oracle import LLAMA, MODELS


@pytest.mark.parametrize(("context", "tokens", "size"), [(40, 2, 16), (32768, 64, 16), (32768, 64, 32)])
def test_all_requests_are_admitted_at_once(context: int, tokens: int, size: int) -> None:
    def admitted(blocks: int) -> int:
        scheduler = Scheduler(
            SchedulerConfig(num_blocks=blocks, block_size=size, max_batch_tokens=1 << 20, max_seqs=4)
        )
        for number in range(4):
            scheduler.add(Request(str(number), [number] * context, 1 + tokens))
        return len(scheduler.schedule().admitted)

    assert admitted(context_parallel.blocks_for([40, context], 4, tokens, size)) == 4
    if context > 1000:  # as many blocks as they hold in the end are too few
        assert admitted(4 * -(-(context + tokens) // size)) == 3


def test_requests_that_wait_for_others_are_an_error(policy_file, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: too few blocks for the second request, whose steps would be added to those of the first."""
    policy_file()
    llm = LLM(MODELS / LLAMA, device="cpu", num_blocks=5, max_seqs=2, async_steps=False, warm="off")
    with pytest.raises(RuntimeError, match="2 more tokens of each request took 4 steps"):
        context_parallel.measure(llm, 40, 2, 2, 1)
