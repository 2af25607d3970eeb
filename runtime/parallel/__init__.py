"""Tensor parallelism: one model over several ranks. `docs/parallel.md` describes the processes and the messages between them.

Layers know only a `Mesh` (rank, world, name of the process group). A weight table declares how each weight is sharded (`ShardSpec`), the loader
keeps the rank's share, and layers see a configuration with the rank's own heads. Row-parallel layers leave their sum to the norm that
follows (`PartialSum`), which calls ``all_reduce_add_rms_norm``. `ParallelRunner` has the interface of `Runner`, so the engine does not
distinguish them. Collective operations take the name of a group (`gristmill.kernels.collective.groups`); their kernels are verified and timed
by as many processes, with a file as the rendezvous. Ranks and replicas are started, and end with their parent, by `child_process`.
"""
