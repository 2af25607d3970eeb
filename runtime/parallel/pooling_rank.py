"""One rank of a model for pooling: it loads its share of the weights, and computes the batches that the driver sends.

Started by the driver as ``python -m gristmill.runtime.parallel.pooling_rank``. Every rank has the tokenizer's side of no text: batches are ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels.collective import symmetric
from gristmill.runtime.errors import RankError
from gristmill.runtime.loader.config import open_checkpoint
from gristmill.runtime.parallel import child_process
from gristmill.runtime.parallel.choices import answer_in_threads, digests, installation
from gristmill.runtime.parallel.rank_base import RankBase, serve_rank
from gristmill.runtime.parallel.wire import GROUP, Loaded
from gristmill.runtime.pooling.engine import PoolingInput
from gristmill.runtime.pooling.open import describe_pooling, load_pooling
from gristmill.runtime.pooling.warm_up import warm_up
from gristmill.runtime.warm_up import WarmUp


class PoolingRank(RankBase):
    """A rank: its part of the model, and the head, which every rank has."""

    def load(self) -> Loaded:
        """Load the model."""
        job = self.job
        if job.rank == 0:
            answer_in_threads(self._resolver, self._choices)
        options = job.loading["options"]
        described = describe_pooling(open_checkpoint(job.loading["path"]), options)
        if described is None:
            raise RankError(f"{job.loading['path']} is not for pooling")
        report = partial(self._report, "weights")
        self._engine = load_pooling(described, options, report, self._mesh, job.policy)
        self._resolver.flush()  # the driver ends ranks by a signal
        engine, plans = self._engine, self._engine.model.plans
        sizes = engine.max_seqs, engine.max_batch_tokens, plans.weight_bytes
        return Loaded(0, *sizes, installation(self._resolver), digests(plans))

    def compute(self, inputs: Sequence[PoolingInput]) -> list[NDArray[np.float32]] | None:
        """As of `PoolingEngine`, as arrays, which only rank 0 sends."""
        rows = self._engine.compute(inputs)
        symmetric.check(GROUP)
        return [row.numpy() for row in rows] if self.job.rank == 0 else None

    def warm_up(self) -> WarmUp:
        """As `gristmill.runtime.pooling.warm_up.warm_up`."""
        report = warm_up(self._engine, self._report)
        self._resolver.flush()
        return report

    def explain(self) -> list[dict[str, Any]]:
        """The rows of `LLM.explain`."""
        return self._engine.explain()

    def choices(self) -> dict[str, str]:
        """The digests of all plans as they are now."""
        return digests(self._engine.model.plans)


def serve(connection: Connection) -> None:
    """Answer the driver until it closes the pipe."""
    serve_rank(connection, PoolingRank)


if __name__ == "__main__":
    child_process.serve(serve)
