"""A rank that has no room for CUDA graphs if it is the second one; `test_parallel_gpu` starts it in place of `gristmill.runtime.parallel.rank`."""

from __future__ import annotations

from typing import Any

from gristmill.runtime.parallel import child_process, rank

MODULE = __name__


class ScarceRank(rank.Rank):
    """Its first graph is over the bound."""

    def allocate(self, *arguments: Any) -> int:
        """As `Rank.allocate`, with a bound of a byte, its last argument, on the second rank."""
        *others, graph_memory = arguments
        return super().allocate(*others, 1 if self.job.rank == 1 else graph_memory)


if __name__ == "__main__":
    rank.Rank = ScarceRank  # type: ignore[misc]
    child_process.serve(rank.serve)
