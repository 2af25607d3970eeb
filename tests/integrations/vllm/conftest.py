"""Tests inside the real vLLM. They run in its own environment: ``$(ci/host_env.sh vllm python) -m pytest tests/integrations/vllm``."""

from __future__ import annotations

import importlib.util
import os
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.kept import beside

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "examples" / "models"
INSTALLED = importlib.util.find_spec("vllm") is not None
CACHE = beside("vllm")
"""With what vLLM finds out about model classes, for which it starts a process each."""
collect_ignore_glob = [] if INSTALLED else ["test_[!i]*.py"]  # test_installed.py says so

# Before vLLM is imported, which reads them once. The scheduler runs in this process. Ranks share one NUMA node.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)


def installed(prefix: str) -> bool:
    """Whether the distribution vllm is here, in a version that begins so."""
    try:
        return version("vllm").startswith(prefix)
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables of this process and its children: gristmill is installed with its entry points."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = site / "gristmill-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gristmill\nVersion: 0.1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    policy = site / "policy.toml"
    policy.write_text(f'cache = "{CACHE / "gristmill"}"\n')
    changes = {
        "GRISTMILL_POLICY": str(policy),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "src")]),
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
    }
    patch = pytest.MonkeyPatch()
    for name, value in changes.items():
        patch.setenv(name, value)
    patch.syspath_prepend(str(site))
    yield {**os.environ, **changes}
    patch.undo()


@pytest.fixture(scope="module")
def host(environment: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """vLLM with our worker: made of the name of an example model, or a directory, and vLLM's options. It finds no AMX, for which its kernels
    of latent attention take no float32."""
    import torch
    from vllm import LLM

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def make(name: str | Path, **options: Any) -> Any:
        defaults = {
            "worker_cls": "gristmill.integrations.vllm.Worker",
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "disable_log_stats": False,
        }
        return LLM(str(MODELS / name), **{**defaults, **options})

    yield make
    patch.undo()
