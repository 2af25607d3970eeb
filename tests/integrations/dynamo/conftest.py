"""Tests inside the real Dynamo, in its own environment: ``$(bash ci/host_env.sh dynamo python) -m pytest tests/integrations/dynamo``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.kept import beside

ROOT = Path(__file__).parents[3]
CACHE = beside("dynamo")
INSTALLED = importlib.util.find_spec("dynamo") is not None
collect_ignore_glob = [] if INSTALLED else ["test_[!i]*.py"]  # test_installed.py says so


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables of this process and its children: no services but files."""
    folder = tmp_path_factory.mktemp("dynamo")
    policy = folder / "policy.toml"
    policy.write_text(f'cache = "{CACHE / "gristmill"}"\n')
    changes = {
        "GRISTMILL_POLICY": str(policy),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_EVENT_PLANE": "zmq",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setenv(name, value)
        yield {**os.environ, **changes}
