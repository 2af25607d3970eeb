"""What an actor with an engine asks of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray


def resources(options: Mapping[str, Any]) -> dict[str, Any]:
    """``{"num_gpus": n}`` for the actor of an engine, for `map_batches`, or as ``ray_actor_options`` of a deployment: one GPU for each of
    the processes that share its model, or {} on the CPU.

    Args:
        options: of `gristmill.LLM`; ``device`` ``auto`` means GPUs where the cluster has any.
    """
    device, count = str(options.get("device", "auto")), int(options.get("tensor_parallel", 1))
    on_gpu = device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return {"num_gpus": count} if on_gpu else {}
