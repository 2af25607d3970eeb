"""The worker as one of several ranks: gristmill's collective operations on vLLM's process group, and kernels that rank 0 chooses.

vLLM starts the processes, hands every rank the same steps, and takes the output of one. All ranks sample, with the same result.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist

from gristmill import ops
from gristmill.kernel_registry.policy import Policy
from gristmill.kernels.collective import symmetric
from gristmill.kernels.collective.groups import join
from gristmill.runtime.errors import UsageError
from gristmill.runtime.parallel.choices import Asking, answer_in_threads, installation
from gristmill.runtime.parallel.mesh import ALONE, Mesh

GROUP = "vllm"
SECONDS = 300.0
"""How long a kernel waits for another rank, unless --distributed-timeout-seconds says."""


def join_ranks(worker: Any, policy: Policy | None) -> Mesh:
    """Join the ranks of a `vllm.v1.worker.worker_base.WorkerBase` whose device is set; `ALONE` for one.

    Raises:
        UsageError: the ranks have different installations or devices, or a rank is not on the device of its number.
    """
    parallel = worker.parallel_config
    world = int(parallel.tensor_parallel_size)
    if world == 1:
        return ALONE
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    if worker.device.type == "cpu":  # as vLLM's own worker: part of the name of memory that ranks share
        os.environ["VLLM_DIST_IDENT"] = worker.distributed_init_method.rpartition(":")[2].rpartition("/")[2]
    init_worker_distributed_environment(
        worker.vllm_config,
        worker.rank,
        worker.distributed_init_method,
        worker.local_rank,
        worker.current_platform.dist_backend,
    )
    group, device = get_tp_group(), worker.device
    rank = int(group.rank_in_group)
    if device.type == "cuda" and device.index != rank:
        raise UsageError(
            f"rank {rank} of the gristmill worker is on cuda:{device.index}; with --tensor-parallel-size rank r is on GPU r of one host"
        )
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // world))
    join(GROUP, group.device_group)
    if device.type == "cuda":
        symmetric.share(
            GROUP,
            group.device_group,
            float(getattr(parallel, "distributed_timeout_seconds", None) or SECONDS),
        )
    resolver = ops.resolver(device, policy)
    connections = _connect(group.cpu_group, rank, world)
    if rank == 0:
        answer_in_threads(resolver, connections)
    else:
        resolver.chooser = Asking(connections[0])
    found: list[Any] = [None] * world
    dist.all_gather_object(found, installation(resolver), group=group.cpu_group)
    if len(set(found)) > 1:
        raise UsageError(
            f"the ranks differ, and would choose different kernels: {'; '.join(map(str, dict.fromkeys(found)))}"
        )
    return Mesh(rank, world, str(device), GROUP)


def _connect(group: Any, rank: int, world: int) -> list[Connection]:
    """Rank 0: a connection to each other rank; others: theirs to rank 0. By a socket in a temporary folder of this host."""
    # Address and key of rank 0's socket.
    meeting: list[Any] = [None, None]
    listener = None
    if rank == 0:
        key = os.urandom(32)
        listener = Listener(family="AF_UNIX", backlog=world, authkey=key)
        meeting = [listener.address, key]
    dist.broadcast_object_list(meeting, src=dist.get_global_rank(group, 0), group=group)
    if listener is None:
        return [Client(meeting[0], "AF_UNIX", authkey=meeting[1])]
    with listener:
        return [listener.accept() for _ in range(world - 1)]
