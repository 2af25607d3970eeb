"""Tests on a local cluster of the real Ray, in its own environment: ``$(bash ci/host_env.sh ray python) -m pytest tests/integrations/ray``."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.kept import beside

ROOT = Path(__file__).parents[3]
CACHE = beside("ray")
INSTALLED = importlib.util.find_spec("ray") is not None
collect_ignore_glob = [] if INSTALLED else ["test_[!i]*.py"]  # test_installed.py says so


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ray with two processors on this machine. Its workers inherit the environment."""
    import ray
    from ray._private import services

    get_node = services.get_node

    def patient(*node: Any) -> Any:
        """Ray's own limit for its start, half a minute, is not an option."""
        deadline = time.monotonic() + 300
        while True:
            try:
                return get_node(*node)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    policy = tmp_path_factory.mktemp("gristmill") / "policy.toml"
    policy.write_text(f'cache = "{CACHE / "gristmill"}"\n')
    changes = {
        "GRISTMILL_POLICY": str(policy),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default, whatever else runs here leaves workers next to nothing
        # Seconds; Ray ends and starts again what takes longer, on a busy machine forever.
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(services, "get_node", patient)
        ray.init(
            address="local",  # a cluster of its own, whatever else runs here
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        yield ray
        ray.shutdown()
