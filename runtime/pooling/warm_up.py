"""Warm-up of an engine for pooling: the kernels of batches of every size are selected, verified and loaded before the first request."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.autotune import compilations
from gristmill.runtime.pooling.engine import PoolingEngine, PoolingInput
from gristmill.runtime.progress import Progress
from gristmill.runtime.warm_up import (
    Calls,
    Phases,
    WarmUp,
    resolved_entries,
    select_and_verify,
    sizes_up_to,
)


def warm_up(engine: PoolingEngine, progress: Progress) -> WarmUp:
    """Prepare batches of each bucket of tokens; on a GPU they also run, which compiles what verification has not. From then on a kernel that is
    selected while requests wait is reported by a RuntimeWarning."""
    plans = engine.model.plans
    phase = Phases(plans.device, progress)
    tried, before = plans.resolver.tried, compilations.total()

    def record() -> Calls:
        with plans.recorded() as recorded:
            for batch in batches(engine):
                engine.compute(batch)
        return [*recorded]

    plans.set_warm(False)
    loads = select_and_verify(plans, record, phase)
    runs = plans.device.type == "cuda"
    with phase("compilation"):
        for load in loads:
            load()
        for batch in batches(engine) if runs else ():
            engine.compute(batch)
    plans.set_warm(True)
    compiled, reused = (now - then for now, then in zip(compilations.total(), before, strict=True))
    verified = plans.resolver.tried - tried
    entries = resolved_entries(plans)
    return WarmUp(phase.seconds, 0, entries, verified, ran=runs, compiled=compiled, reused=reused)


def batches(engine: PoolingEngine) -> Iterator[list[PoolingInput]]:
    """A batch of as many tokens as each bucket has, in as few sequences as may be; and one of as many sequences, which are the rows of the head."""
    longest = engine.max_length
    for size in sizes_up_to(max(engine.max_batch_tokens, longest)):
        lengths = [longest] * (size // longest) + [size % longest] * (size % longest > 0)
        yield [PoolingInput([0] * length) for length in lengths]
    for size in sizes_up_to(min(engine.max_seqs, engine.max_batch_tokens)):
        yield [PoolingInput([0])] * size
