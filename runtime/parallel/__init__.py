"""Tensor parallelism: one model over several ranks. `docs/parallel.md` describes the processes and the messages between them."""
