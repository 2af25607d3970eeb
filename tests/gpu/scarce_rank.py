"""A rank that has no room for CUDA graphs if it is the second one; `test_parallel_gpu` starts it in place of `gristmill.runtime.parallel.rank`."""

from __future__ import annotations

from gristmill.runtime.parallel import child_process, rank

MODULE = __name__


class ScarceRank(rank.Rank):
    """Its first graph is over the bound."""

    def allocate(
        self,
        num_blocks: int,
        max_seqs: int,
        decode_graphs: bool | None,
        prompt_graphs: int | None,
        graph_memory: int | float | None,
    ) -> int:
        """As `Rank.allocate`, with a bound of a byte on the second rank."""
        bound = 1 if self.job.rank == 1 else graph_memory
        return super().allocate(num_blocks, max_seqs, decode_graphs, prompt_graphs, bound)


if __name__ == "__main__":
    rank.Rank = ScarceRank  # type: ignore[misc]
    child_process.serve(rank.serve)
